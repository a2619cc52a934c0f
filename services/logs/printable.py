"""Other people's texts in our messages and logs: without control characters, and cut to a length in messages."""

from __future__ import annotations


def printable(text: str, most: int) -> str:
    """The text with a space for each character that cannot be shown, cut to ``most`` characters."""
    kept = "".join(char if char.isprintable() else " " for char in text[: most + 1])
    return kept if len(kept) <= most else f"{kept[: most - 3]}..."


def printable_line(text: str, most: int) -> str:
    """The same, with single spaces."""
    # Twice as much is looked at: some of it may be spaces.
    line = " ".join(printable(text, 2 * most).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def escaped(text: str) -> str:
    r"""The text in one line, with ``\n``, ``\x1b`` or ``\u202e`` in the place of each character that cannot be shown."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
