"""The estimators that decisions learn by while running: a mean, a ratio, a slope, and recent durations.

None of them reads a clock or holds text. docs/decisions.md lists where each is used.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class DecayingMean:
    """A mean in which old values fade. Its unit is that of the values.

    The n-th value weighs ``1 / (prior + n)``, as in a plain mean that counts ``value`` as ``prior`` values, but never less
    than ``newest``. So the mean remembers about ``1 / newest`` values.

    >>> tokens = DecayingMean(1.0, newest=0.25, prior=0.5)
    >>> for _ in range(3):
    ...     _ = tokens.add(4.0)
    >>> round(tokens.value, 2)
    3.57

    Attributes:
        value: the mean; what is assumed at first.
        newest: least weight of a new value, between 0 and 1.
        prior: how many values the first assumption counts as. Infinite: every value weighs ``newest``.
        count: values so far.
    """

    value: float
    newest: float
    prior: float = math.inf
    count: int = 0

    def add(self, value: float, most: float = math.inf) -> float:
        """Add a value. Returns by how much it differed from the mean.

        Args:
            most: it counts as different by at most so much.
        """
        self.count += 1
        difference, weight = value - self.value, 1 / (self.prior + self.count)
        if not -most <= difference <= most:
            difference = most if difference > most else -most
        self.value += (weight if weight > self.newest else self.newest) * difference
        return difference

    def include(self, value: float) -> None:
        """As ``add``, however much it differs: for what is added to several times in every step of every request."""
        self.count += 1
        weight = 1 / (self.prior + self.count)
        self.value += (weight if weight > self.newest else self.newest) * (value - self.value)

    def successor(self) -> DecayingMean:
        """A new mean that assumes the value of this one at first."""
        return DecayingMean(self.value, self.newest, self.prior)


@dataclass(slots=True)
class Ratio:
    """A ratio of two sums, shrunk towards what is assumed. Its unit is that of ``part`` per that of ``whole``.

    >>> accepted = Ratio()
    >>> accepted.add(part=6.0, whole=8.0)
    >>> accepted.of(0.25, 8.0)
    0.5

    Attributes:
        part: the sum above.
        whole: the sum below.
    """

    part: float = 0.0
    whole: float = 0.0

    def add(self, part: float, whole: float) -> None:
        """Add to both sums."""
        self.part += part
        self.whole += whole

    def keep(self, share: float) -> None:
        """Let both sums fade to a share of what they were."""
        self.part *= share
        self.whole *= share

    def fade(self, memory: float, more: float = 0.0) -> None:
        """Let both sums fade so that the one below, with ``more`` to come, is at most ``memory``."""
        self.keep(memory / max(memory, self.whole + more))

    def of(self, assumed: float = 0.0, weight: float = 0.0) -> float:
        """The estimate.

        Args:
            assumed: the ratio before anything is known.
            weight: how much of ``whole`` that counts as.
        """
        whole = self.whole + weight
        return (self.part + weight * assumed) / whole if whole else assumed


@dataclass(slots=True)
class Slope(Ratio):
    """By how much y grows for each unit of x: least squares through the origin, with old pairs fading.

    It is the ratio of the sums of ``x * y`` and ``x * x``. A pair tells as much as its x is far from 0, and displaces as
    much of the older ones: pairs that tell nothing displace nothing.

    >>> seconds_per_draft = Slope()
    >>> for drafts in (-1.0, 0.0, 1.0):
    ...     seconds_per_draft.learn(drafts, 0.002 * drafts, memory=40.0)
    >>> round(seconds_per_draft.of(), 6)
    0.002
    """

    def learn(self, x: float, y: float, memory: float) -> None:
        """Add a pair of deviations.

        Args:
            memory: the sum of squares of x that is remembered.
        """
        self.keep(max(0.0, 1.0 - x * x / memory))
        self.add(x * y, x * x)


class RecentTimes:
    """The latest durations of one kind, in seconds. They say how long such things take, and how long one still takes.

    >>> drafts = RecentTimes(16)
    >>> for took in (0.001, 0.002, 0.006):
    ...     drafts.add(took)
    >>> drafts.median, drafts.longer_than(0.0015)
    (0.002, [0.002, 0.006])

    Args:
        remembered: how many are kept.
    """

    def __init__(self, remembered: int) -> None:
        self._took: deque[float] = deque(maxlen=remembered)

    def __len__(self) -> int:
        return len(self._took)

    def add(self, seconds: float) -> None:
        """Add one; infinite: it never ended."""
        self._took.append(seconds)

    def extend(self, seconds: Sequence[float]) -> None:
        """As ``add`` of each."""
        self._took.extend(seconds)

    @property
    def mean(self) -> float:
        """Their mean. There must be one."""
        return sum(self._took) / len(self._took)

    @property
    def median(self) -> float:
        """Their median. There must be one."""
        return statistics.median(self._took)

    @property
    def longest(self) -> float:
        """The longest; 0 if there is none."""
        return max(self._took, default=0.0)

    def longer_than(self, age_s: float, slack_s: float = 0.0) -> list[float]:
        """Those that took longer than something has taken so far, oldest first. Its own time is likely to be like theirs.

        Args:
            slack_s: added to each.
        """
        return [took + slack_s for took in self._took if took + slack_s > age_s]
