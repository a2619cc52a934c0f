"""Takes the measurements: all contestants by turns, again and again.

One request at a time is measured task by task. Several at a time need enough of them to stay together: there a round is all
requests, tasks mixed as a server's users would.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.records import Cell, Contestant, ContestantFailed, LoadPoint, Request

ALL_TASKS = "(all tasks)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What is measured: every contestant on every task, at every concurrency, so often."""

    concurrency: tuple[int, ...]
    repeats: int
    max_tokens: int
    temperature: float

    def rounds(self, requests: Sequence[Request]) -> Iterator[Round]:
        """In the order of measuring."""
        tasks = list(dict.fromkeys(request.task for request in requests))
        for repeat, concurrency in itertools.product(range(self.repeats), self.concurrency):
            for task in tasks if concurrency == 1 else [ALL_TASKS]:
                yield Round(repeat=repeat, concurrency=concurrency, task=task, requests=tuple(requests_of(requests, task)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What all contestants do once, by turns."""

    repeat: int
    concurrency: int
    task: str
    requests: tuple[Request, ...]


def requests_of(requests: Sequence[Request], task: str) -> list[Request]:
    """The requests of a task, or those of all tasks, dealt in turn."""
    by_task: dict[str, list[Request]] = {}
    for request in requests:
        by_task.setdefault(request.task, []).append(request)
    if task != ALL_TASKS:
        return by_task[task]
    return [request for hand in itertools.zip_longest(*by_task.values()) for request in hand if request is not None]


@dataclass(slots=True)
class Measurements:
    """Grows while measuring: what is there when somebody interrupts is kept."""

    cells: list[Cell] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def measure(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    schedule: Schedule,
    into: Measurements,
    on_cell: Callable[[str], None] = lambda name: None,
) -> None:
    """Fill ``into``. In every round the contestants take turns, each round another one first, so that what the machine does
    meanwhile meets all of them. Who fails is left out from then on.

    Args:
        on_cell: told the contestant after every measurement, failed ones too.
    """
    for number, current in enumerate(schedule.rounds(requests)):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            if able(contestant, current.concurrency) and contestant.name not in into.failures:
                try:
                    into.cells.append(_cell(contestant, current, schedule))
                except ContestantFailed as error:
                    into.failures[contestant.name] = str(error)
            on_cell(contestant.name)


def _cell(contestant: Contestant, current: Round, schedule: Schedule) -> Cell:
    load = LoadPoint(
        requests=current.requests,
        concurrency=current.concurrency,
        max_tokens=schedule.max_tokens,
        temperature=schedule.temperature,
        tenant=f"{contestant.name} {current.concurrency} {current.repeat}",
    )
    return Cell(
        contestant=contestant.name,
        task=current.task,
        concurrency=current.concurrency,
        repeat=current.repeat,
        outcome=contestant.run(load),
    )


def able(contestant: Contestant, concurrency: int) -> bool:
    """Whether it can do so many requests at once."""
    return contestant.most_at_once is None or concurrency <= contestant.most_at_once
