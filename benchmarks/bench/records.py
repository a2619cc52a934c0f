"""The data types of a benchmark: prompts, requests, answers, cells, contestants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from speculation.errors import OutriderError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The user's turns in one conversation, and the system's message before them; empty: there is none."""

    id: str
    task: str
    turns: tuple[str, ...]
    system: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One turn as every contestant receives it: the same token ids and the same seed.

    ``turn``: the user's words, for those who read a recorded run.
    """

    id: str
    task: str
    prompt: tuple[int, ...]
    seed: int
    turn: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedAnswer:
    """A contestant's answer to a request.

    Attributes:
        tokens: token ids, including the end-of-sequence token.
        arrivals: (seconds since the request was sent, number of tokens that arrived then).
        histogram: ``histogram[a]`` is the number of steps that accepted ``a`` drafted tokens; empty if not reported.
        seconds_saved: what the server says that drafting saved; None if not reported.
    """

    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    histogram: tuple[int, ...] = ()
    seconds_saved: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds from sending the request to its last token."""
        return self.arrivals[-1][0] if self.arrivals else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPoint:
    """One cell's work for a contestant: answer these requests, ``concurrency`` at a time."""

    requests: tuple[Request, ...]
    concurrency: int
    max_tokens: int
    temperature: float
    # Every cell is a tenant of its own, so that caches filled by one cell cannot help another.
    tenant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOutcome:
    """A contestant's answers to a load, in the order of its requests, and the seconds for all of them together.

    ``loop``: what our own decoding loop counted meanwhile (``services.verifier.engine.stats.LoopStats``); empty for peers.
    """

    answers: tuple[TimedAnswer, ...]
    wall_s: float
    loop: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement: one contestant, task, concurrency and repeat."""

    contestant: str
    task: str
    concurrency: int
    repeat: int
    outcome: LoadOutcome


class ContestantFailed(OutriderError):
    """A contestant crashed, hung or refused; the others go on."""


class Contestant(Protocol):
    """A strategy or a peer. Several may share one engine."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        ...

    @property
    def most_at_once(self) -> int | None:
        """Highest concurrency that it supports; None: any."""
        ...

    def run(self, load: LoadPoint) -> LoadOutcome:
        """Answer all requests.

        Raises:
            ContestantFailed: it crashed, hung or refused.
        """
        ...
