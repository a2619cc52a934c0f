"""Long texts in torch's store, which takes at most 8 MiB of one value and closes the connection of who brings more."""

from __future__ import annotations

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

# Each takes at most four bytes.
MOST_CHARACTERS = 1 << 20


def set_long(store: TCPStore, key: str, text: str) -> None:
    """Write a text of any length; ``key`` is there once all of it is.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    parts = [text[at : at + MOST_CHARACTERS] for at in range(0, len(text), MOST_CHARACTERS)]
    for number, part in enumerate(parts):
        store.set(f"{key}/part/{number}", part)
    store.set(key, str(len(parts)))


def get_long(store: TCPStore, key: str) -> str:
    """The text that was written there.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    return b"".join([store.get(f"{key}/part/{number}") for number in range(int(store.get(key)))]).decode()
