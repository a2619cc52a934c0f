"""Policies that set the length of a draft before it begins: constant, or by the outcome of earlier steps.

The heuristics are Hugging Face's (``num_assistant_tokens_schedule``): two tokens more after a step that accepted all drafts,
one less, but at least one, after any other.
"""

from __future__ import annotations

from typing_extensions import override

from services.drafter.stopping.interface import DraftedToken
from speculation.messages import OpenSession


class Static:
    """Implements ``StopPolicy``: always the same number of tokens."""

    reads_distribution = False

    def __init__(self, length: int) -> None:
        self.length = length

    def open(self, message: OpenSession) -> PlannedLength:
        return PlannedLength(self.length)


class Heuristic:
    """Implements ``StopPolicy``: Hugging Face's heuristic.

    Args:
        length: number of tokens of the first draft.
        transient: every request begins with ``length``; otherwise with the length that the requests before it have reached,
            and requests at the same time share one length.
    """

    reads_distribution = False

    def __init__(self, length: int, *, transient: bool) -> None:
        self._first = length
        self._shared = None if transient else AdaptedLength(length)

    def open(self, message: OpenSession) -> AdaptedLength:
        return self._shared or AdaptedLength(self._first)


class PlannedLength:
    """Implements ``StopState``: drafts as long as was planned."""

    def __init__(self, length: int) -> None:
        self.length = length

    def begin(self, position: int) -> int:
        return self.length

    def more(self, drafted: DraftedToken) -> bool:
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        """The length is constant."""


class AdaptedLength(PlannedLength):
    """A planned length that follows the outcomes of steps.

    A draft that was cut short says nothing for longer ones: the length would grow far beyond what a draft may hold, and take
    many misses to come back.
    """

    @override
    def observe(self, drafted: int, accepted: int) -> None:
        if accepted < drafted:
            self.length = max(1, self.length - 1)
        elif drafted >= self.length:
            self.length += 2
