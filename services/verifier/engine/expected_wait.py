"""How long a request would wait for a seat, from how long answers have held theirs."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from services.verifier.engine.clock import now
from speculation.estimators import RecentTimes

# Answers remembered.
_REMEMBERED = 128


class SlotTimes:
    """How long answers hold a seat, in seconds of the event loop's clock. Pauses of preempted requests do not count."""

    def __init__(self) -> None:
        self._held = RecentTimes(_REMEMBERED)
        # By request: when it was seated last (None: it is preempted), and how long it was seated before.
        self._seats: dict[str, tuple[float | None, float]] = {}

    @property
    def mean_s(self) -> float | None:
        """Mean seconds that the last answers held a seat; None: there were none yet."""
        return self._held.mean if self._held else None

    def taken(self, name: str) -> None:
        """Note that a request was seated, for the first time or again."""
        self._seats[name] = (now(), self._age(name))

    def given_up(self, name: str) -> None:
        """Note that a request was preempted."""
        self._seats[name] = (None, self._age(name))

    def ended(self, name: str) -> None:
        """Learn from a request that has ended; one that was never seated teaches nothing."""
        if name in self._seats:
            self._held.add(self._age(name))
            del self._seats[name]

    def left_s(self, name: str) -> float:
        """Expected seconds until a seated request ends: the mean over those earlier answers that took longer than it so far.

        One that takes longer than all of them is expected to exceed them by as much again.
        """
        age = self._age(name)
        longer = self._held.longer_than(age)
        return sum(longer) / len(longer) - age if longer else age - self._held.longest

    def _age(self, name: str) -> float:
        since, before = self._seats.get(name, (None, 0.0))
        return before if since is None else before + now() - since


def expected_wait(seats: Sequence[float], ahead: int, mean_s: float) -> float:
    """Expected seconds until the request behind ``ahead`` others gets a seat.

    Args:
        seats: seconds until each seat is free; 0: it is.
        mean_s: how long an answer holds a seat.
    """
    free_in = list(seats)
    heapify(free_in)
    for _ in range(ahead):
        heapreplace(free_in, free_in[0] + mean_s)
    return free_in[0]
