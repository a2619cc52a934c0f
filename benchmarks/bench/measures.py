"""Measures computed from cells. ``FORMULAS`` explains them in --help and in the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.bench.records import Cell, TimedAnswer

FORMULAS = {
    "tau": "tokens per pass of the target, including the bonus token: committed tokens / passes that committed any",
    "saved/answer": "seconds by which drafting made an answer come sooner than plainly in the same company, by the "
    "verifier's own costs (the speed-up is measured); negative: later; mean over answers",
    "acceptance at position i": "passes that accepted at least i drafted tokens / passes",
    "acceptance of a source": "accepted nodes of the source / verified nodes of the source",
    "nodes per pass": "drafted tokens verified / passes, over all requests of a batch",
    "tok/s (micro)": "all tokens / all seconds: what a server delivers",
    "tok/s (macro)": "mean over the tasks of each task's tokens / seconds: every task counts the same (1 at once only)",
    "speed-up": "tok/s of a contestant / tok/s of another in the same repeat; median, lowest and highest",
    "TTFT": "time to first token: from sending a request to its first token, including the queue",
    "ITL": "inter-token latency of a request: (last arrival - first arrival) / tokens that came after the first arrival",
    "longest gap": "99th percentile of the time between two arrivals: tokens of one pass arrive together",
    "draft share": "share of the wall time spent waiting while drafts were made: min(waited, drafting) / wall time (in one "
    "process nobody waits, and drafting is among the other parts)",
    "RPC share": "the rest of the waiting for drafts (transport, coding, queues) / wall time",
    "verify share": "time of forward passes, choosing and keeping rows / wall time",
    "idle share": "time without a step in progress (clients, router, event loop) / wall time",
    "draft-ahead hits": "used drafts that were made before the step they follow was decided / used drafts",
    "peak memory": "highest resident memory, summed over the contestant's processes (strategies share one engine)",
}

# A ratio is unclear if its repeats lie further apart than this, or on both sides of 1 while the median is not close to 1.
_WIDEST = 0.25
_SAME = 0.03


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of all repeats; empty if nothing was measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else float("nan")

    @property
    def low(self) -> float:
        return min(self.values, default=float("nan"))

    @property
    def high(self) -> float:
        return max(self.values, default=float("nan"))

    @property
    def unclear(self) -> str | None:
        """Why the median, as a ratio, is unreliable; None if it is not."""
        if len(self.values) < 2:
            return "one repeat: no spread is known"
        if (self.high - self.low) / self.median > _WIDEST:
            return f"repeats lie more than {_WIDEST:.0%} apart"
        if self.low < 1 < self.high and abs(self.median - 1) > _SAME:
            return "repeats lie on both sides of 1"
        return None

    def as_object(self) -> dict[str, Any]:
        """The JSON object for results.json; null where nothing was measured."""
        if not self.values:
            return {"median": None, "low": None, "high": None, "values": []}
        return {"median": self.median, "low": self.low, "high": self.high, "values": list(self.values)}


def tokens_of(cells: Iterable[Cell]) -> int:
    """Number of tokens in all answers."""
    return sum(len(answer.tokens) for cell in cells for answer in cell.outcome.answers)


def speed(cells: Sequence[Cell]) -> float:
    """Tokens per second over all of ``cells`` (micro average)."""
    return tokens_of(cells) / sum(cell.outcome.wall_s for cell in cells)


def by_repeat(cells: Iterable[Cell], measure: Callable[[list[Cell]], float]) -> Spread:
    """``measure`` of each complete repeat."""
    repeats: dict[int, list[Cell]] = {}
    for cell in cells:
        repeats.setdefault(cell.repeat, []).append(cell)
    # An interrupted repeat cannot be compared with a complete one.
    whole = max(map(len, repeats.values()), default=0)
    return Spread(tuple(measure(repeats[repeat]) for repeat in sorted(repeats) if len(repeats[repeat]) == whole))


def macro_speed(cells: Sequence[Cell]) -> float:
    """Tokens per second, averaged over tasks."""
    tasks: dict[str, list[Cell]] = {}
    for cell in cells:
        tasks.setdefault(cell.task, []).append(cell)
    return statistics.fmean(speed(several) for several in tasks.values())


def ratio(ours: Iterable[Cell], theirs: Iterable[Cell]) -> Spread:
    """Speed of ``ours`` over speed of ``theirs`` in each repeat, over the cells that both have."""
    a = {(cell.repeat, cell.task, cell.concurrency): cell for cell in ours}
    b = {(cell.repeat, cell.task, cell.concurrency): cell for cell in theirs}
    both = [cell for key, cell in a.items() if key in b]
    others = {cell.repeat: [b[key] for key in a if key in b and key[0] == cell.repeat] for cell in both}
    return by_repeat(both, lambda cells: speed(cells) / speed(others[cells[0].repeat]))


def answers_of(cells: Iterable[Cell]) -> list[TimedAnswer]:
    """All answers with at least one token."""
    return [answer for cell in cells for answer in cell.outcome.answers if answer.tokens]


def tau(answers: Sequence[TimedAnswer]) -> float | None:
    """Tokens per pass; None if the contestant does not report its passes."""
    steps = sum(sum(answer.histogram) for answer in answers)
    return sum(len(answer.tokens) for answer in answers if answer.histogram) / steps if steps else None


def seconds_saved(answers: Sequence[TimedAnswer]) -> float | None:
    """Seconds that drafting saved, per answer; None if the contestant does not report them."""
    told = [answer.seconds_saved for answer in answers if answer.seconds_saved is not None]
    return statistics.fmean(told) if told else None


def acceptance_per_position(answers: Sequence[TimedAnswer]) -> list[float]:
    """Share of passes that accepted at least 1, 2, ... drafted tokens."""
    longest = max((a + 1 for answer in answers for a, steps in enumerate(answer.histogram) if steps), default=0)
    counts = [sum(answer.histogram[a] for answer in answers if a < len(answer.histogram)) for a in range(longest)]
    return [sum(counts[position:]) / sum(counts) for position in range(1, longest)]


def latencies(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Time to first token (median, 95th percentile), inter-token latency (median) and longest gap, in seconds."""
    first = [answer.arrivals[0][0] for answer in answers]
    itl = [
        (answer.arrivals[-1][0] - answer.arrivals[0][0]) / (len(answer.tokens) - answer.arrivals[0][1])
        for answer in answers
        if len(answer.tokens) > answer.arrivals[0][1]
    ]
    gaps = [later[0] - earlier[0] for answer in answers for earlier, later in pairwise(answer.arrivals)]
    return {
        "ttft_median_s": percentile(first, 0.5),
        "ttft_p95_s": percentile(first, 0.95),
        "itl_median_s": percentile(itl, 0.5),
        "gap_p99_s": percentile(gaps, 0.99),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a ``share`` of all values does not exceed (nearest rank); nan without values."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def loop_counts(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Counts of the decoding loop: shares of the wall time, nodes, sources, draft-ahead; None for peers."""
    loops = [cell.outcome.loop for cell in cells if cell.outcome.loop]
    if not loops:
        return None
    wall = sum(cell.outcome.wall_s for cell in cells if cell.outcome.loop)
    seconds: dict[str, float] = {}
    nodes: dict[str, int] = {}
    accepted: dict[str, int] = {}
    # By source: of requests that leave out what does not pay, and of those that named it. Earlier versions counted neither.
    nested: dict[str, dict[str, dict[str, Any]]] = {"source_choices": {}, "weighed": {}, "named": {}}
    for loop in loops:
        _add(seconds, loop["times"]["seconds"])
        _add(nodes, loop["nodes_by_source"])
        _add(accepted, loop["accepted_by_source"])
        for field, sums in nested.items():
            for source, counts in loop.get(field, {}).items():
                _add(sums.setdefault(source, {}), counts)
    passes = sum(loop["times"]["steps"] for loop in loops)
    used = sum(loop["drafts_used"] for loop in loops)
    waited = seconds.get("draft_wait", 0.0)
    drafting = min(waited, sum(loop["drafting_s"] for loop in loops))
    verify = sum(seconds.get(part, 0.0) for part in ("forward", "choose", "keep"))
    steps = sum(seconds.get(part, 0.0) for part in ("draft_wait", "schedule", "begin", "pass_and_verify", "deliver"))
    return {
        "passes": passes,
        "nodes_per_pass": sum(nodes.values()) / passes if passes else 0.0,
        **nested,
        "acceptance_by_source": {source: accepted.get(source, 0) / count for source, count in nodes.items() if count},
        "shares": {
            "draft": drafting / wall,
            "rpc": (waited - drafting) / wall,
            "verify": verify / wall,
            "other": max(0.0, steps - waited - verify) / wall,
            "idle": max(0.0, wall - steps) / wall,
        },
        "draft_ahead_hits": sum(loop["drafts_ahead"] for loop in loops) / used if used else 0.0,
    }


def _add(sums: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        sums[key] = sums.get(key, 0) + value
