"""Notices that a text begins to repeat itself. It needs no draft: the text shows what prompt lookup would have predicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# So many tokens predict the next one. After so many right predictions in a row a draft is worth a try.
_CONTEXT, _STREAK = 2, 2
# Tokens of the text before the answer that are read, and pairs that are remembered.
_READ, _REMEMBERED = 2048, 8192


class Repetition:
    """What followed each pair of tokens the last time, over one text.

    Args:
        tokens: the text so far.

    Attributes:
        begins: the last tokens have just repeated enough of an earlier passage to go on with it.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.begins = False
        self._followers: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._last: tuple[int, ...] = ()
        self._streak = 0
        self.commit(tokens[-_READ:])

    def commit(self, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` follow."""
        before = self._streak
        for token in tokens:
            right = self._followers.get(self._last) == token
            self._streak = self._streak + 1 if right else 0
            if len(self._last) == _CONTEXT:
                self._followers[self._last] = token
                if len(self._followers) > _REMEMBERED:
                    self._followers.popitem(last=False)
            self._last = (*self._last, token)[-_CONTEXT:]
            before = min(before, self._streak)
        self.begins = before < _STREAK <= self._streak
