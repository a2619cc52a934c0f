"""How long a request would wait for a slot: one of the ``max_num_seqs`` that decode at once."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from services.verifier.engine.clock import now
from speculation.estimators import RecentTimes

# Answers remembered.
_REMEMBERED = 128


class SlotTimes:
    """How long answers hold a slot, in seconds of the event loop's clock. Pauses of preempted requests do not count."""

    def __init__(self) -> None:
        self._held = RecentTimes(_REMEMBERED)
        # By request: when it got its slot (None: it is preempted), and how long it had one before.
        self._slots: dict[str, tuple[float | None, float]] = {}

    @property
    def mean_s(self) -> float | None:
        """Mean seconds for which the last answers held a slot; None: there were none yet."""
        return self._held.mean if self._held else None

    def taken(self, name: str) -> None:
        """Note that a request got a slot, for the first time or again."""
        self._slots[name] = (now(), self._age(name))

    def given_up(self, name: str) -> None:
        """Note that a request was preempted."""
        self._slots[name] = (None, self._age(name))

    def ended(self, name: str) -> None:
        """Learn from a request that has ended. One that never had a slot teaches nothing."""
        if name in self._slots:
            self._held.add(self._age(name))
            del self._slots[name]

    def left_s(self, name: str) -> float:
        """Expected seconds until a request with a slot ends: the mean of earlier answers that took longer, less its age.

        A request older than all of them is expected to exceed the longest by as much again.
        """
        age = self._age(name)
        longer = self._held.longer_than(age)
        return sum(longer) / len(longer) - age if longer else age - self._held.longest

    def _age(self, name: str) -> float:
        since, before = self._slots.get(name, (None, 0.0))
        return before if since is None else before + now() - since


def expected_wait(slots: Sequence[float], ahead: int, mean_s: float) -> float:
    """Expected seconds until the request behind ``ahead`` others gets a slot.

    Args:
        slots: seconds until each slot is free; 0: it is.
        mean_s: how long an answer holds a slot.
    """
    free_in = list(slots)
    heapify(free_in)
    for _ in range(ahead):
        heapreplace(free_in, free_in[0] + mean_s)
    return free_in[0]
