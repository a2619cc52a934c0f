"""Takes the measurements: all contestants by turns, in several repeats.

At concurrency 1 each task is measured separately. At higher concurrency a round consists of all requests with mixed tasks,
as on a server with many users, because a batch needs enough requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.bench.records import Cell, Contestant, ContestantFailed, LoadPoint, Request

ALL_TASKS = "(all tasks)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Every contestant is measured on every task, at every concurrency, ``repeats`` times."""

    concurrency: tuple[int, ...]
    repeats: int
    max_tokens: int
    temperature: float

    def rounds(self, requests: Sequence[Request]) -> Iterator[Round]:
        """All rounds in the order of measurement."""
        tasks = list(dict.fromkeys(request.task for request in requests))
        loads = [(at_once, task) for at_once in self.concurrency for task in (tasks if at_once == 1 else [ALL_TASKS])]
        for repeat, (number, (concurrency, task)) in itertools.product(range(self.repeats), enumerate(loads)):
            yield Round(
                repeat=repeat,
                number=number,
                concurrency=concurrency,
                task=task,
                requests=tuple(requests_of(requests, task)),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Requests that all contestants answer once, by turns.

    Attributes:
        number: counted from 0 within the repeat.
    """

    repeat: int
    number: int
    concurrency: int
    task: str
    requests: tuple[Request, ...]


def requests_of(requests: Sequence[Request], task: str) -> list[Request]:
    """The requests of a task; for ``ALL_TASKS`` all requests, one of each task in turn."""
    by_task: dict[str, list[Request]] = {}
    for request in requests:
        by_task.setdefault(request.task, []).append(request)
    if task != ALL_TASKS:
        return by_task[task]
    return [request for hand in itertools.zip_longest(*by_task.values()) for request in hand if request is not None]


@dataclass(slots=True)
class Measurements:
    """Results so far. They are kept when a run is interrupted."""

    cells: list[Cell] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def measure(
    contestants: Sequence[Contestant],
    requests: Sequence[Request],
    schedule: Schedule,
    into: Measurements,
    on_cell: Callable[[str], None] = lambda name: None,
) -> None:
    """Add measurements to ``into``.

    The contestants take turns, and each round starts with another one, the same load in the next repeat, too: on a machine
    that becomes faster while it is measured, who always comes second looks faster. A contestant that fails is left out from
    then on.

    Args:
        on_cell: called with the contestant's name after every measurement, also after a failed or skipped one.
    """
    for current in schedule.rounds(requests):
        first = (current.number + current.repeat) % len(contestants)
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
    """Whether the contestant supports this concurrency."""
    return contestant.most_at_once is None or concurrency <= contestant.most_at_once
