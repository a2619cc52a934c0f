"""What a soak has shown: how many answers were right, what leaked, and the sentence that says it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bench.measures import percentile
from benchmarks.soak.exchanges import Judged
from benchmarks.soak.faults import SoakFault
from benchmarks.soak.resources import CONFIDENCE, FEW_FILES, SMALL_MIB, WARM_UP, Trend

FORMULAS = {
    "right": "a whole answer whose tokens are those of plain decoding with the same seed, asked for before the first fault",
    "ended in one explicit error": "UNAVAILABLE or RESOURCE_EXHAUSTED (503, 429) with a sentence, or a connection that "
    "is closed before the answer's end is marked; every token that had been shown is right",
    "left": "the user closed the stream or the connection; every token that had been shown is right",
    "anything else": "a wrong, missing or repeated token, no end within two minutes, two ends, another error",
    "TTFT, gap, whole": "of streams: time to the first token, longest time between two pieces; of whole answers: from "
    "sending to the end",
    "held": "requests, sessions and blocks of the cache that components still tell of a minute after the last user",
    "memory": "what would be free if the process ended (USS)",
    "slope": f"of least squares through the medians of 16 stretches, after the first {WARM_UP:.0%} of a process's longest "
    f"life; the interval is that of {CONFIDENCE:.0%}, with neighbours' correlation",
    "leak": "of memory: the interval lies above 0, and the growth that is certain over the whole time is above "
    f"{SMALL_MIB:g} MiB; of descriptors: 45 s after the last user, its garbage collected, a process has over {FEW_FILES} "
    "more than any of its kind had before the first one. In between they rise and fall with the collections",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakVerdict:
    """Counts of a soak.

    Attributes:
        wrong: what was neither right nor an explicit error, a line each.
        held: what components still held when all users were gone.
        trends: of all processes with a long life.
        files: of each process, descriptors before the first user and after the last one, while nobody asks.
        ended: components whose process ended by itself.
    """

    right: int
    left: int
    errors: int
    wrong: tuple[str, ...]
    faults: int
    held: Mapping[str, float]
    trends: tuple[Trend, ...]
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    ended: tuple[str, ...] = ()

    @property
    def answers(self) -> int:
        """Answers that users waited for."""
        return self.right + self.errors + len(self.wrong)

    @property
    def leaks(self) -> tuple[str, ...]:
        """What grows, a line each."""
        return tuple(
            f"{each.process}: {each.measure} grows by {each.low:.1f} to {each.high:.1f} an hour, from {each.first:.0f} "
            f"to {each.last:.0f}"
            for each in self.trends
            if each.leaks
        ) + tuple(
            f"{process}: {after} descriptors after the last user, {before} before the first"
            for process, (before, after) in self.files.items()
            if after > before + FEW_FILES
        )

    @property
    def good(self) -> bool:
        """Whether nothing was wrong, and nothing leaked."""
        return bool(self.right) and not (self.wrong or self.held or self.leaks or self.ended)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        other = f"{len(self.wrong)}" if self.wrong else "none"
        return (
            f"Of {self.answers:,} answers under {self.faults} faults, {self.right:,} were right, {self.errors:,} ended in "
            f"one explicit error, {other} in anything else."
        )

    @property
    def line(self) -> str:
        """The verdict: yes or NO with the reasons, after the sentence."""
        if self.good:
            return f"{self.sentence} Nothing leaked."
        reasons = [
            (len(self.wrong), "wrong answers"),
            (len(self.held), "things still held"),
            (len(self.leaks), "leaks"),
            (len(self.ended), "processes that ended"),
            (not self.right, "no right answer"),
        ]
        return f"NO: {', '.join(f'{int(count)} {what}' for count, what in reasons if count)}. {self.sentence}"


def verdict_of(
    judged: Sequence[Judged],
    faults: Sequence[SoakFault],
    held: Mapping[str, float],
    found: Sequence[Trend],
    files: Mapping[str, tuple[int, int]] | None = None,
    ended: Sequence[str] = (),
) -> SoakVerdict:
    """The verdict on what was seen."""
    return SoakVerdict(
        right=sum(each.outcome == "right" for each in judged),
        left=sum(each.outcome == "left" for each in judged),
        errors=sum(each.outcome == "error" for each in judged),
        wrong=tuple(each.wrong for each in judged if each.outcome == "broken"),
        faults=len(faults),
        held=held,
        trends=tuple(found),
        files=files or {},
        ended=tuple(ended),
    )


def latencies_by_tenant(judged: Iterable[Judged]) -> dict[str, dict[str, dict[str, float]]]:
    """Percentiles by tenant and measure (ttft, gap, whole), in seconds, and how many there are of each."""
    values: dict[str, dict[str, list[float]]] = {}
    for each in judged:
        own = values.setdefault(each.tenant, {"ttft": [], "gap": [], "whole": []})
        for name, value in (("ttft", each.first_s), ("gap", each.gap_s)):
            if value is not None:
                own[name].append(value)
        if each.outcome == "right":
            own["whole"].append(each.total_s)
    return {tenant: {name: _percentiles(several) for name, several in own.items()} for tenant, own in sorted(values.items())}


def _percentiles(values: Sequence[float]) -> dict[str, Any]:
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p100": 1.0}
    return {"count": len(values)} | {name: percentile(values, share) for name, share in shares.items()}
