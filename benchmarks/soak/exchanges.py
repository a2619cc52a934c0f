"""What one user saw of one answer, and what that makes of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.soak.requests import SoakRequest

# right: whole, and every token that of plain decoding. left: the user went before the end. error: one explicit error.
# In these three all tokens that were shown are right; everything else is broken.
Outcome = Literal["right", "left", "error", "broken"]
WHOLE, LEFT = "whole", "left"
# What a right request may be told while something is broken: come back later, or nothing more as the connection is gone.
# Any other error, such as an internal one or a refusal of what was asked, is broken, and so is an answer without an end.
EXPLICIT = (
    "Unavailable",
    "ResourceExhausted",
    "HTTP 503",
    "HTTP 429",
    "HTTP service_unavailable",
    "HTTP rate_limit_exceeded",
    "connection lost",
)


@dataclass(kw_only=True, slots=True)
class SoakExchange:
    """A request under way at a door, and its answer as it comes.

    Attributes:
        began_s: when it was sent, on the clock of ``time.perf_counter``.
        arrivals: of each piece of the answer, seconds after it was sent.
        streamed: whether the answer comes in pieces.
        end: ``whole``, ``left``, or the kind of the error.
        said: the error's own words.
        ends: how many ends there were.
    """

    request: SoakRequest
    tenant: str
    door: str
    strategy: str
    streamed: bool
    began_s: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    total_s: float = 0.0
    end: str = ""
    said: str = ""
    ends: int = 0

    def show(self, token_ids: Sequence[int]) -> None:
        """Note a piece of the answer."""
        self.tokens += token_ids
        self.arrivals.append(time.perf_counter() - self.began_s)

    def over(self, end: str, said: str = "") -> None:
        """Note an end."""
        self.ends += 1
        self.end, self.said, self.total_s = end, said, time.perf_counter() - self.began_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """An exchange without its tokens; ``wrong`` says what is broken, empty if nothing is."""

    tenant: str
    door: str
    strategy: str
    outcome: Outcome
    error: str
    wrong: str
    began_s: float
    first_s: float | None
    gap_s: float | None
    total_s: float


def judge(exchange: SoakExchange, expected: Mapping[str, Sequence[int]]) -> Judged:
    """What the exchange makes of its answer.

    Args:
        expected: the tokens of plain decoding, by the requests' names.
    """
    wrong = _wrong(exchange, expected[exchange.request.name])
    outcome: Outcome = "broken" if wrong else "right"
    if not wrong and exchange.end != WHOLE:
        outcome = "left" if exchange.end == LEFT else "error"
    arrivals = exchange.arrivals if exchange.streamed else []
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return Judged(
        tenant=exchange.tenant,
        door=exchange.door,
        strategy=exchange.strategy,
        outcome=outcome,
        error=exchange.end if outcome == "error" else "",
        wrong=wrong,
        began_s=exchange.began_s,
        first_s=arrivals[0] if arrivals else None,
        gap_s=max(gaps, default=None),
        total_s=exchange.total_s,
    )


def _wrong(exchange: SoakExchange, right: Sequence[int]) -> str:
    where = f"{exchange.request.name}, {exchange.strategy}, {exchange.door}"
    for at, token in enumerate(exchange.tokens):
        if at >= len(right) or token != right[at]:
            instead = right[at] if at < len(right) else "the end"
            return f"{where}: token {at} is {token} instead of {instead}"
    if exchange.ends != 1:
        return f"{where}: {exchange.ends} ends"
    if exchange.end == WHOLE and len(exchange.tokens) < len(right):
        return f"{where}: ended as a whole after {len(exchange.tokens)} of {len(right)} tokens"
    if exchange.end not in (WHOLE, LEFT, *EXPLICIT):
        return f"{where}: {exchange.end} after {len(exchange.tokens)} tokens: {exchange.said}"
    return ""
