"""What a benchmark is made of: prompts, requests, answers, cells, and how a contestant ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from speculation.errors import OutriderError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a user says, turn by turn, in one of the tasks."""

    id: str
    task: str
    turns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One turn as every contestant gets it: the same token ids, the same seed."""

    id: str
    task: str
    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedAnswer:
    """What a contestant made of a request.

    Attributes:
        tokens: ids, an end-of-sequence token included.
        arrivals: (seconds since the request was sent, tokens that came then).
        histogram: ``histogram[a]`` steps accepted exactly ``a`` drafted tokens; empty where the contestant does not say.
    """

    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    histogram: tuple[int, ...] = ()

    @property
    def total_s(self) -> float:
        """From sending the request to its last token."""
        return self.arrivals[-1][0] if self.arrivals else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPoint:
    """A cell's order to a contestant: these requests, so many at a time."""

    requests: tuple[Request, ...]
    concurrency: int
    max_tokens: int
    temperature: float
    # Nothing that an earlier cell has taught a cache may help a later one: every cell is a tenant of its own.
    tenant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A contestant's answers to a load, in the order of its requests, and the seconds that all of them took.

    ``loop`` is what our own decoding loop counted meanwhile (``services.verifier.engine.stats.LoopStats``); empty for peers.
    """

    answers: tuple[TimedAnswer, ...]
    wall_s: float
    loop: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement: contestant, task, concurrency, repeat."""

    contestant: str
    task: str
    concurrency: int
    repeat: int
    outcome: Outcome


class ContestantFailed(OutriderError):
    """A contestant crashed, hung or refused; the others go on."""


class Contestant(Protocol):
    """Who answers. Several may share one engine."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def most_at_once(self) -> int | None:
        """The highest concurrency that it can do; None: any."""
        ...

    def run(self, load: LoadPoint) -> Outcome:
        """Answer all requests.

        Raises:
            ContestantFailed: it cannot.
        """
        ...
