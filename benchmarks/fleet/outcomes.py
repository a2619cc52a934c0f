"""What a fleet did in a day: when each request got its first and its last token, what the GPUs cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.bench.measures import percentile
from benchmarks.fleet.traffic import Arrival

# The goal of the alert OutriderFirstTokensAreLate (k8s/outrider/alerts).
LATE_S = 2.5


@dataclass(slots=True)
class Ends:
    """How each request ended: exactly one of the last three lists has its number.

    Attributes:
        first_s: seconds from its arrival to its first token; nan if it got none.
        took_s: seconds from its first token to its last; nan if it did not finish.
        finished: numbers of the requests that got their whole answer.
        refused: of those that were told to come again, before they had a token.
        lost: of those whose answer broke off.
        moved: how often an answer went on at another verifier.
    """

    first_s: list[float]
    took_s: list[float]
    finished: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    moved: int = 0

    @classmethod
    def of(cls, requests: int) -> Ends:
        """Nothing has happened yet."""
        return cls([math.nan] * requests, [math.nan] * requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The fleet at one time of the day.

    Attributes:
        running: verifiers that take requests.
        paid: verifiers whose GPUs are paid for: those that start and those that end, too.
        waiting: requests without a slot.
        arrived: requests since the moment before.
    """

    at_s: float
    running: int
    paid: int
    waiting: int
    arrived: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOutcome:
    """A fleet's day in numbers; times in seconds, per token in seconds as well, money in dollars.

    Attributes:
        late_share: of the requests that came: first tokens after more than ``LATE_S``, refused ones included.
    """

    name: str
    requests: int
    finished: int
    refused: int
    lost: int
    moved: int
    tokens: int
    gpu_hours: float
    cost: float
    per_million: float
    first_p50_s: float
    first_p99_s: float
    per_token_p50_s: float
    per_token_p99_s: float
    late_share: float
    mean_running: float
    fewest: int
    most: int
    moments: tuple[Moment, ...]

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def outcome(
    name: str, arrivals: Sequence[Arrival], ends: Ends, gpu_s: float, price: float, moments: Sequence[Moment]
) -> FleetOutcome:
    """Sum a day up.

    Args:
        gpu_s: seconds of single GPUs that were paid for.
        price: dollars for one GPU and hour.
    """
    tokens = sum(arrivals[number].answer for number in ends.finished)
    firsts = [value for value in ends.first_s if not math.isnan(value)]
    each = [ends.took_s[number] / (arrivals[number].answer - 1) for number in ends.finished if arrivals[number].answer > 1]
    late = sum(value > LATE_S for value in firsts) + len(arrivals) - len(firsts)
    cost = price * gpu_s / 3600
    running = [moment.running for moment in moments]
    return FleetOutcome(
        name=name,
        requests=len(arrivals),
        finished=len(ends.finished),
        refused=len(ends.refused),
        lost=len(ends.lost),
        moved=ends.moved,
        tokens=tokens,
        gpu_hours=gpu_s / 3600,
        cost=cost,
        per_million=1e6 * cost / tokens if tokens else math.inf,
        first_p50_s=percentile(firsts, 0.5),
        first_p99_s=percentile(firsts, 0.99),
        per_token_p50_s=percentile(each, 0.5),
        per_token_p99_s=percentile(each, 0.99),
        late_share=late / len(arrivals),
        mean_running=math.fsum(running) / len(running),
        fewest=min(running),
        most=max(running),
        moments=tuple(moments),
    )
