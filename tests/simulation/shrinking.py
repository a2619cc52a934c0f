"""Makes a failing schedule smaller: the fewest requests, events and fault points with which it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.simulation.schedule import Schedule, schedule_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a seed's schedule, as a line of ``seeds.txt`` names it: numbers of requests and events, names of points."""

    seed: int
    asks: tuple[int, ...]
    events: tuple[int, ...]
    points: tuple[str, ...]

    @property
    def schedule(self) -> Schedule:
        """What is left of the seed's schedule."""
        return schedule_of(self.seed).only(self.asks, self.events, self.points)

    def __str__(self) -> str:
        numbers = [",".join(map(str, each)) or "-" for each in (self.asks, self.events)]
        return f"{self.seed} asks={numbers[0]} events={numbers[1]} points={','.join(self.points) or '-'}"


def whole(seed: int) -> Part:
    """All of a seed's schedule."""
    schedule = schedule_of(seed)
    return Part(
        seed=seed,
        asks=tuple(range(len(schedule.asks))),
        events=tuple(range(len(schedule.events))),
        points=schedule.points,
    )


def read(line: str) -> Part:
    """The inverse of ``str``."""
    seed, asks, events, points = line.split(None, 3)
    numbers = [tuple(int(each) for each in text.partition("=")[2].split(",") if each != "-") for text in (asks, events)]
    names = tuple(each for each in points.partition("=")[2].strip().split(",") if each != "-")
    return Part(seed=int(seed), asks=numbers[0], events=numbers[1], points=names)


def shrunk(part: Part, fails: Callable[[Part], bool]) -> Part:
    """The part without everything that the failure does not need, taken away one at a time until nothing more can be."""
    smaller = True
    while smaller:
        smaller = False
        for name in ("events", "points", "asks"):
            for entry in getattr(part, name):
                less = replace(part, **{name: _without(getattr(part, name), entry)})
                if fails(less):
                    part, smaller = less, True
    return part


def _without(entries: Sequence[object], entry: object) -> tuple[object, ...]:
    return tuple(each for each in entries if each != entry)
