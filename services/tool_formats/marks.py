"""How marks stand in an answer's text, so that none is taken from text that only looks like one.

Where a mark is a special token, it stands as a character that no text has: one half of a surrogate pair. Other marks are
the text that they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FIRST, _LAST = 0xD800, 0xDFFF


class Marks:
    """The marks of one model.

    Args:
        special: its special tokens, by their names.
    """

    def __init__(self, special: Mapping[str, int] = MappingProxyType({})) -> None:
        self._special = special
        self._letters: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def __call__(self, mark: str) -> str:
        """A mark as it stands in the text."""
        token = self._special.get(mark)
        if token is None or _FIRST + len(self._letters) > _LAST:
            return mark
        letter = self._letters.setdefault(token, chr(_FIRST + len(self._letters)))
        self._names[ord(letter)] = mark
        return letter

    def __bool__(self) -> bool:
        """Whether any mark is a special token."""
        return bool(self._letters)

    def letter(self, token: int) -> str | None:
        """What stands for a token; None: it is no mark, or one that is text."""
        return self._letters.get(token)

    def spelt(self, text: str, *, named: bool) -> str:
        """A text for users: special tokens by their names, or left out."""
        return text.translate(self._names if named else dict.fromkeys(self._names)) if self._letters else text
