"""What records of the chaos matrix show, as numbers and as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from tests.chaos.cells import ALL, ALL_BETWEEN_NODES, ALL_ON_RAY, CROWD
from tests.chaos.history import AFTERWARDS, DONE, FAILED, FAULT, Record


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell showed.

    Attributes:
        broken: what the history breaks.
        streams: how many were running.
        failed: how many of them ended in an error.
        pause_s: longest time for which a stream that had not ended showed nothing, from the fault on.
        recovery_s: from the fault's beginning until a request that came after it was answered; infinite: never.
    """

    broken: list[str]
    streams: int
    failed: int
    pause_s: float
    recovery_s: float

    @classmethod
    def of(cls, record: Record) -> Self:
        users = [name for name in record.expected if name != AFTERWARDS and name not in CROWD]
        broke_at = next(event.at for event in record.events if event.kind == FAULT)
        answered = (event.at for event in record.events if (event.stream, event.kind) == (AFTERWARDS, DONE))
        return cls(
            broken=record.violations,
            streams=len(users),
            failed=sum(event.kind == FAILED and event.stream in users for event in record.events),
            pause_s=max(_pause_s(record, name, broke_at) for name in users),
            recovery_s=next(answered, float("inf")) - broke_at,
        )

    @property
    def right(self) -> bool:
        return not self.broken and self.recovery_s < float("inf")


def _pause_s(record: Record, name: str, since: float) -> float:
    seen = [since, *(event.at for event in record.events if event.stream == name and event.at > since)]
    return max((later - earlier for earlier, later in itertools.pairwise(seen)), default=0.0)


def table(records: Iterable[Record]) -> str:
    """One line for each component, fault and what goes on beside it, in Markdown: the worst of its cells in every column."""
    lines = [
        "| component | fault | beside | cells | streams right | ended in an error | longest pause | new request answered |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    order = {
        (cell.component, cell.fault, cell.beside): number
        for number, cell in reversed(list(enumerate((*ALL, *ALL_ON_RAY, *ALL_BETWEEN_NODES))))
    }
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for record in records:
        cell = record.plan.cell
        found.setdefault((cell.component, cell.fault, cell.beside), []).append(Outcome.of(record))
    for (component, fault, beside), outcomes in sorted(found.items(), key=lambda entry: order.get(entry[0], len(order))):
        streams, failed = (sum(getattr(each, name) for each in outcomes) for name in ("streams", "failed"))
        right = (
            "all"
            if all(each.right for each in outcomes)
            else "; ".join(itertools.chain(*(each.broken for each in outcomes)))
        )
        pause, recovery = (max(getattr(each, name) for each in outcomes) for name in ("pause_s", "recovery_s"))
        lines.append(
            f"| {component} | {fault} | {beside} | {len(outcomes)} | {right} | {failed} of {streams} | {pause:.1f} s | {recovery:.1f} s |"
        )
    return "\n".join(lines)
