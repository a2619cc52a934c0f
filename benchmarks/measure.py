"""Takes the measurements: all contestants by turns, task by task, again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.types import Cell, Contestant, ContestantFailed, Load, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What is measured: every contestant on every task, at every concurrency, so often."""

    concurrency: tuple[int, ...]
    repeats: int
    max_tokens: int
    temperature: float

    def rounds(self, requests: Sequence[Request]) -> Iterator[tuple[int, int, str]]:
        """(repeat, concurrency, task) in the order of measuring."""
        tasks = list(dict.fromkeys(request.task for request in requests))
        return itertools.product(range(self.repeats), self.concurrency, tasks)


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
    for number, (repeat, concurrency, task) in enumerate(schedule.rounds(requests)):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            if able(contestant, concurrency) and contestant.name not in into.failures:
                load = Load(
                    requests=tuple(request for request in requests if request.task == task),
                    concurrency=concurrency,
                    max_tokens=schedule.max_tokens,
                    temperature=schedule.temperature,
                    tenant=f"{contestant.name} {concurrency} {repeat}",
                )
                try:
                    outcome = contestant.run(load)
                except ContestantFailed as error:
                    into.failures[contestant.name] = str(error)
                else:
                    into.cells.append(
                        Cell(contestant=contestant.name, task=task, concurrency=concurrency, repeat=repeat, outcome=outcome)
                    )
            on_cell(contestant.name)


def able(contestant: Contestant, concurrency: int) -> bool:
    """Whether it can do so many requests at once."""
    return contestant.most_at_once is None or concurrency <= contestant.most_at_once
