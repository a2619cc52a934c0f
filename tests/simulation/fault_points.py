"""Named points at which our own links may go wrong, as FoundationDB's BUGGIFY: drawn from the seed, and counted.

In each schedule only some of the points are at work, so that schedules differ in kind and not only in their numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection

# Every point, with how often it fires where it is at work. What does not stand here cannot be asked for.
POINTS = {
    "drafts: a call is lost": 0.1,
    "drafts: a reply is lost": 0.15,
    "drafts: a reply comes twice": 0.2,
    "drafts: a reply is overtaken": 0.3,
    "drafts: a reply is very late": 0.15,
    "drafts: the stream breaks": 0.03,
    "retrieval: a reply is lost": 0.2,
    "retrieval: a reply is very late": 0.3,
    "retrieval: the stream breaks": 0.05,
    "redis: a command fails": 0.2,
    "redis: a command is slow": 0.2,
    "answers: an event is late": 0.1,
    "answers: the stream breaks": 0.04,
    "answers: the request is lost": 0.05,
    "serve: a question is lost": 0.1,
    "serve: a dead verifier is still listed": 0.5,
    "target: a pass is slow": 0.05,
    "target: the pool says that it is full": 0.1,
}
# The share of points at work in a schedule.
_AT_WORK = 0.25


class FaultPoints:
    """The points of one run.

    Args:
        at_work: those that may fire.
        clock: seconds of the run.

    Attributes:
        reached, fired: how often, by point.
        when: the time of each that fired, and its name.
        quiet: nothing fires any more.
    """

    def __init__(self, at_work: Collection[str], seed: int, clock: Callable[[], float]) -> None:
        self._at_work = frozenset(at_work)
        self._clock = clock
        self.when: list[tuple[float, str]] = []
        self._random = random.Random(seed)
        self.reached: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.quiet = False

    def fires(self, point: str) -> bool:
        """Whether a fault is to happen at a point now."""
        often = POINTS[point]
        self.reached[point] += 1
        if self.quiet or point not in self._at_work or self._random.random() >= often:
            return False
        self.fired[point] += 1
        self.when.append((self._clock(), point))
        return True


def drawn(source: random.Random) -> tuple[str, ...]:
    """The points that are at work in a schedule."""
    return tuple(point for point in POINTS if source.random() < _AT_WORK)
