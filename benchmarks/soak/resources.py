"""Memory and open files of processes over time, and whether they grow: slopes with their confidence intervals."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

CONFIDENCE = 0.99
# Of a process's life, so much counts as its beginning: caches fill, and threads get their stacks.
WARM_UP = 0.3
MEASURES = ("memory", "files")
# MiB that may come within the time that was watched, even for certain: less is an allocator's affair.
SMALL_MIB = 8.0
# Descriptors that a process may have more after the last user than before the first one: connections to its neighbours.
FEW_FILES = 8
# A life says something of growth if it is so much of the longest one.
_LONG = 0.5
_BLOCKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a process uses.

    Attributes:
        at_s: seconds after the users began.
        process: component and number.
        life: which of its processes it is; one that was killed has further ones.
        memory: MiB that would be free if it ended.
        files: open descriptors.
    """

    at_s: float
    process: str
    life: int
    memory: float
    files: int


def usage_of(pid: int, process: str, life: int, at_s: float) -> Usage | None:
    """What the process uses now; None: it has ended."""
    try:
        found = psutil.Process(pid)
        memory = found.memory_full_info().uss / 2**20
        return Usage(at_s=at_s, process=process, life=life, memory=memory, files=found.num_fds())
    except psutil.Error:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """How a measure of a process changed once it was warm.

    Attributes:
        measure: memory (in MiB) or files.
        seconds: how long that was watched.
        slope: per hour; ``low`` and ``high`` are the bounds of its confidence interval.
    """

    process: str
    measure: str
    first: float
    last: float
    seconds: float
    slope: float
    low: float
    high: float

    @property
    def leaks(self) -> bool:
        """Whether memory grows: 0 lies below the interval, and what grew for certain is not small.

        Descriptors rise and fall with the collections of garbage; whether they leak is seen when nobody asks any more.
        """
        return self.measure == "memory" and self.low > 0 and self.low * self.seconds / 3600 > SMALL_MIB

    def as_object(self) -> dict[str, Any]:
        """The JSON object for results.json."""
        return {name: getattr(self, name) for name in (*self.__slots__, "leaks")}


def trends(samples: Iterable[Usage]) -> list[Trend]:
    """The trends of processes' longest lives, where they are long enough to say anything."""
    lives: dict[str, dict[int, list[Usage]]] = {}
    for sample in samples:
        lives.setdefault(sample.process, {}).setdefault(sample.life, []).append(sample)
    found = []
    longest_of = {name: max(several.values(), key=_length) for name, several in sorted(lives.items())}
    least = _LONG * max(map(_length, longest_of.values()), default=0.0)
    for process, longest in longest_of.items():
        if _length(longest) < least:
            continue
        warm = longest[int(WARM_UP * len(longest)) :]
        for measure in MEASURES:
            points = [(each.at_s, float(getattr(each, measure))) for each in warm]
            if len(points) >= _BLOCKS:
                found.append(_trend(process, measure, points))
    return found


def _length(life: Sequence[Usage]) -> float:
    return life[-1].at_s - life[0].at_s


def _trend(process: str, measure: str, points: Sequence[tuple[float, float]]) -> Trend:
    slope, error = slope_of(_blocks(points))
    reach = student(CONFIDENCE, _BLOCKS - 2) * error
    return Trend(
        process=process,
        measure=measure,
        first=points[0][1],
        last=points[-1][1],
        seconds=points[-1][0] - points[0][0],
        slope=3600 * slope,
        low=3600 * (slope - reach),
        high=3600 * (slope + reach),
    )


def _blocks(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The medians of equal stretches: what is held for single requests is not what grows."""
    edges = [round(index * len(points) / _BLOCKS) for index in range(_BLOCKS + 1)]
    parts = [points[begin:end] for begin, end in itertools.pairwise(edges)]
    return [(statistics.median(at for at, _ in part), statistics.median(value for _, value in part)) for part in parts]


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares' slope and its standard error, which counts that neighbours are alike (their lag-1 correlation)."""
    mean_at = statistics.fmean(at for at, _ in points)
    mean = statistics.fmean(value for _, value in points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    slope = sum((at - mean_at) * (value - mean) for at, value in points) / spread
    rest = [value - mean - slope * (at - mean_at) for at, value in points]
    squares = sum(each**2 for each in rest)
    if not squares:
        return slope, 0.0
    alike = max(0.0, sum(a * b for a, b in itertools.pairwise(rest)) / squares)
    # So many of the points say something of their own (Zwiers and von Storch, 1995).
    own = max(3.0, len(points) * (1 - alike) / (1 + alike))
    return slope, math.sqrt(squares / (own - 2) / spread)


def student(confidence: float, freedom: int) -> float:
    """Student's two-sided quantile, by Cornish and Fisher's expansion: right to a hundredth from five degrees on."""
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))
