"""The target's hidden states over a corpus, written to disk as they are computed, so that an interrupted build can go on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval_index.manifest import END
from retrieval_index.perplexity import Scorer
from retrieval_index.progress import Advance, batches
from speculation.files import write_whole

_STATES, _KEY = "states.f16", "states.key"

Tokens = NDArray[np.uint32]


class StateFile:
    """Hidden states of a list of documents, in order.

    Args:
        key: everything besides the documents that the states depend on.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file, self._key_file = folder / _STATES, folder / _KEY
        self._key = key

    def fill(
        self, documents: Sequence[Tokens], window: int, scorer: Callable[[], Scorer], advance: Advance
    ) -> tuple[NDArray[np.float16], Tokens]:
        """Compute the states that are missing. ``documents`` ([tokens] each, none empty) are read in windows of ``window``
        tokens.

        Returns:
            States, [positions, width], and tokens, [positions]. A position with the token ``END`` and a state of zeros
            follows each document.
        """
        windows = [part for ids in documents for part in _windows(ids, window)]
        tokens = np.concatenate(windows)
        digest = hashlib.sha256(f"{self._key}/{window}".encode() + tokens.tobytes()).hexdigest()
        positions, width = self._begun(digest)
        done = int(np.searchsorted(np.cumsum([len(each) for each in windows]), positions, side="right"))
        advance("hidden states", done, len(windows))
        if done < len(windows):
            model = scorer()
            begun = sum(len(each) for each in windows[:done])
            with self._file.open("r+b" if done else "wb") as file:
                file.seek(2 * width * begun)
                for batch in batches(windows[done:], len):
                    states = model.states([each[each != END].tolist() for each in batch])
                    width = states[0].shape[1]
                    if not done:
                        write_whole(self._key_file, f"{digest} {width}".encode())
                    for ids, made in zip(batch, states, strict=True):
                        file.write(np.pad(made, ((0, len(ids) - len(made)), (0, 0))).astype("<f2").tobytes())
                    done += len(batch)
                    advance("hidden states", done, len(windows))
                file.truncate()
        return np.memmap(self._file, dtype="<f2", mode="r").reshape(-1, width), tokens

    def delete(self) -> None:
        """Delete the file, once its states are in the index."""
        self._file.unlink(missing_ok=True)
        self._key_file.unlink(missing_ok=True)

    def _begun(self, digest: str) -> tuple[int, int]:
        """How many positions are on disk, and the width of a state; (0, 0) if nothing there fits ``digest``."""
        try:
            key, width = self._key_file.read_text().split()
            if key == digest and int(width) > 0:
                return self._file.stat().st_size // (2 * int(width)), int(width)
        except (OSError, ValueError):
            pass
        return 0, 0


def _windows(document: Tokens, window: int) -> list[Tokens]:
    """The document in stretches of ``window`` tokens; ``END`` is appended to the last one."""
    parts = [document[start : start + window] for start in range(0, len(document), window)]
    return [*parts[:-1], np.append(parts[-1], np.uint32(END))]
