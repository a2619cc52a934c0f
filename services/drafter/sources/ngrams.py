"""The n-grams of a text that grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence


class GrowingNgrams:
    """Yields every n-gram of ``length`` tokens once.

    Attributes:
        tail: the text's last tokens, at most ``length``.
    """

    def __init__(self, length: int) -> None:
        self.tail: deque[int] = deque(maxlen=length)

    def read(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The n-grams that end in one of these tokens, which follow what was read before."""
        for token in tokens:
            self.tail.append(token)
            if len(self.tail) == self.tail.maxlen:
                yield tuple(self.tail)
