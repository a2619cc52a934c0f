"""The grid, and what is recorded of one contestant's turn in one cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from typing_extensions import override

from benchmarks.never_slower.kinds import KINDS
from speculation.errors import ConfigurationError

PLAIN = "autoregressive"
SHORT, LONG = "short", "4k"
LENGTHS = (SHORT, LONG)
TOPOLOGIES = ("process", "ray")


@dataclass(frozen=True, kw_only=True, slots=True)
class GridCell:
    """One load: ``at_once`` requests of a kind in flight.

    Attributes:
        on: ``process`` or ``ray``: where the components run.
        length: ``short``: prompts as they are; ``4k``: behind notes of about 4096 tokens.
    """

    on: str
    at_once: int
    kind: str
    temperature: float
    length: str

    @override
    def __str__(self) -> str:
        where = "on Ray" if self.on == "ray" else "in process"
        return f"{self.at_once} at once, {self.kind}, T {self.temperature:g}, {self.length}, {where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTurn:
    """What a contestant did in one turn.

    Attributes:
        turn: its place in the round; plain decoding has the first and the last.
        seconds: how long it was measured.
        tenths: tokens that arrived in every tenth of a second of them.
        shared: so many of the tenths lie before it began a request that plain decoding never reached.
        work_s: request-seconds that it took for the tokens that it and plain decoding's turns all have.
        plain_work_s: the same of plain decoding, on average; in plain decoding's own turns, of its other one.
        ttft_s: median seconds from a request to its first token, 0 without any.
        answers: requests that were begun, all of which were compared with plain decoding's.
        wrong: where tokens differ from plain decoding's, one sentence each.
        error: why it failed; empty: it did not.
    """

    cell: GridCell
    repeat: int
    turn: int
    strategy: str
    seconds: float
    tenths: tuple[int, ...]
    shared: int
    work_s: float
    plain_work_s: float
    ttft_s: float
    answers: int
    wrong: tuple[str, ...] = ()
    error: str = ""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(self.tenths) / self.seconds if self.seconds else 0.0

    def as_object(self) -> dict[str, Any]:
        """The JSON object for results.json."""
        return asdict(self)

    @staticmethod
    def from_object(entry: dict[str, Any]) -> LoadTurn:
        """Raises:
        TypeError, KeyError, AttributeError: it is not what ``as_object`` makes.
        """
        lists = {name: tuple(entry[name]) for name in ("tenths", "wrong")}
        return LoadTurn(**{**entry, **lists, "cell": GridCell(**entry["cell"])})


def grid(
    at_once: Iterable[int], kinds: Iterable[str], temperatures: Iterable[float], lengths: Iterable[str], on: Iterable[str]
) -> tuple[GridCell, ...]:
    """All cells, those of one topology together.

    Raises:
        ConfigurationError: a kind, a length or a topology does not exist; names it.
    """
    kinds, lengths, on = tuple(kinds), tuple(lengths), tuple(on)
    for option, given, known in (("--kinds", kinds, KINDS), ("--lengths", lengths, LENGTHS), ("--on", on, TOPOLOGIES)):
        if wrong := [name for name in given if name not in known]:
            raise ConfigurationError(f"{option}: there is no {wrong[0]}; there are {', '.join(known)}", about=option)
    cells = (
        GridCell(on=where, length=length, temperature=temperature, kind=kind, at_once=count)
        for where, length, temperature, kind, count in product(on, lengths, tuple(temperatures), kinds, tuple(at_once))
    )
    # Nothing is measured twice because it is named twice.
    return tuple(dict.fromkeys(cells))
