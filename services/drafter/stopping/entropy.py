"""Stops where the draft distribution is unsure: SVIP (arXiv 2411.18462).

Its bound: a token from a draft distribution is accepted with a probability of at least 1 - sqrt(c * entropy); the authors
found c = 0.15.
"""

from __future__ import annotations

import math

from typing_extensions import override

from services.drafter.stopping.interface import DraftedToken
from services.drafter.stopping.lengths import PlannedLength
from speculation.messages import OpenSession

_C = 0.15


class Entropy:
    """Implements ``StopPolicy``: stops after a token whose distribution has sqrt(0.15 * entropy) above ``threshold``.

    Args:
        length: most tokens of a draft.
    """

    reads_distribution = True

    def __init__(self, length: int, threshold: float) -> None:
        self._length = length
        self._threshold = threshold

    def open(self, message: OpenSession) -> EntropyState:
        return EntropyState(self._length, self._threshold)


class EntropyState(PlannedLength):
    """Implements ``StopState``."""

    def __init__(self, length: int, threshold: float) -> None:
        super().__init__(length)
        self._threshold = threshold

    @override
    def more(self, drafted: DraftedToken) -> bool:
        return math.sqrt(_C * drafted.entropy) <= self._threshold
