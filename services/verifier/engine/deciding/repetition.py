"""Notices that a text begins to repeat itself. It needs no draft: the text shows what prompt lookup would have predicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# Bits of a token id, and of the last one.
_BITS = 32
_LAST = (1 << _BITS) - 1
# So many tokens predict the next one. After so many right predictions in a row a draft is worth a try.
_CONTEXT, _STREAK = 2, 2
# Tokens of the text before the answer that are read, and pairs that are remembered.
READ, REMEMBERED = 2048, 8192


class Repetition:
    """What followed each pair of tokens the last time, over one text.

    Args:
        tokens: the text so far.

    Attributes:
        begins: the last tokens have just repeated enough of an earlier passage to go on with it.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.begins = False
        # By two tokens, as one number.
        self._followers: OrderedDict[int, int] = OrderedDict()
        self._last = 0
        self._read = 0
        self._streak = 0
        self.commit(tokens[-READ:])

    def commit(self, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` follow."""
        before, streak, last, followers, read = self._streak, self._streak, self._last, self._followers, self._read
        for token in tokens:
            streak = streak + 1 if followers.get(last) == token else 0
            if read >= _CONTEXT:
                followers[last] = token
                if len(followers) > REMEMBERED:
                    followers.popitem(last=False)
            read += 1
            # Of the last one alone first: a number of three tokens costs more.
            last = (last & _LAST) << _BITS | token
            before = streak if streak < before else before
        self._last, self._streak, self._read = last, streak, read
        self.begins = before < _STREAK <= streak
