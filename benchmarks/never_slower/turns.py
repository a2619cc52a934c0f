"""The turns of a round: plain decoding, every strategy, and plain decoding again, all with the same requests.

A processor's own speed varies within a minute by more than what is looked for. So each contestant has a service of its own,
in a process of its own, and they take turns of a second: what slows the machine slows them all. On Ray there is one service,
and one contestant is measured after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import outrider
from benchmarks.never_slower.cells import PLAIN, GridCell
from benchmarks.never_slower.kinds import CHANGING
from benchmarks.never_slower.load import LoadRecord, LoadShape, RunningLoad, keep_in_flight
from benchmarks.never_slower.own_service import HeldService
from benchmarks.never_slower.requests import RoundRequests

# Kinds that a run with changing prompts sees.
CHANGES = 3
# What was cancelled leaves the server's batch before the next turn.
_SETTLE_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """How a round runs.

    Attributes:
        strategies: what is compared with plain decoding.
        seconds: how long each contestant is measured; where kinds change, ``CHANGES`` times ``change_every_s`` instead.
        lead_s: longest time until all requests of a contestant have begun to be answered.
        stretch_s: how long a contestant with a service of its own decodes at a stretch.
    """

    strategies: tuple[str, ...]
    seconds: float
    lead_s: float = 60.0
    change_every_s: float = 30.0
    stretch_s: float = 1.0

    def seconds_of(self, cell: GridCell) -> float:
        """How long a contestant in this cell is measured."""
        return CHANGES * self.change_every_s if cell.kind == CHANGING else self.seconds

    @property
    def contestants(self) -> tuple[str, ...]:
        """Plain decoding twice: two equal ones differ, and that is the noise."""
        return (PLAIN, *self.strategies, PLAIN)

    def order(self, repeat: int) -> tuple[int, ...]:
        """Contestants by their places: plain decoding first and last, and no strategy always behind the same one."""
        count = len(self.strategies)
        return (0, *(1 + (place + repeat) % count for place in range(count)), count + 1)


@dataclass(kw_only=True, slots=True)
class Measured:
    """A contestant's load, or why it failed, and in the end what was wrong in its answers."""

    strategy: str
    record: LoadRecord | None = None
    error: str = ""
    wrong: list[str] = field(default_factory=list)


class Contestants(Protocol):
    """Those who take turns.

    Attributes:
        clients: of each contestant, in the plan's order. The first one's server is asked for whatever is not measured.
    """

    @property
    def clients(self) -> Sequence[outrider.AsyncClient]: ...

    async def take_turns(
        self, requests: RoundRequests, cell: GridCell, repeat: int, plan: RoundPlan, advance: Callable[[], None]
    ) -> list[Measured]:
        """All turns of a round, in its order; a failed one says why. Nothing that is asked is known from before.

        ``advance`` is called once for each contestant.

        Raises:
            ConfigurationError: the prompts do not fit into the model's context.
        """


class OneService:
    """Contestants that share a service, which forgets everything before the next one's turn."""

    def __init__(self, client: outrider.AsyncClient, contestants: int) -> None:
        self.clients = (client,) * contestants

    async def take_turns(
        self, requests: RoundRequests, cell: GridCell, repeat: int, plan: RoundPlan, advance: Callable[[], None]
    ) -> list[Measured]:
        measured = []
        for place in plan.order(repeat):
            measured.append(await self._take_turn(requests, cell, plan.contestants[place], plan))
            advance()
        return measured

    async def _take_turn(self, requests: RoundRequests, cell: GridCell, strategy: str, plan: RoundPlan) -> Measured:
        client = self.clients[0]
        try:
            await client.forget()
            supply = requests.supply(plan.change_every_s)
            return Measured(strategy=strategy, record=await keep_in_flight(client, supply, _shape(cell, strategy, plan)))
        except outrider.OutriderError as error:
            return Measured(strategy=strategy, error=str(error))
        finally:
            await asyncio.sleep(_SETTLE_S)


class OwnServices:
    """Contestants with a service each, of which one decodes at a time."""

    def __init__(self, services: Sequence[HeldService]) -> None:
        self.clients = tuple(service.client for service in services)
        self._services = services

    async def take_turns(
        self, requests: RoundRequests, cell: GridCell, repeat: int, plan: RoundPlan, advance: Callable[[], None]
    ) -> list[Measured]:
        running = []
        for place in plan.order(repeat):
            service, strategy = self._services[place], plan.contestants[place]
            supply = requests.supply(plan.change_every_s)
            load = RunningLoad(service.client, supply, _shape(cell, strategy, plan), service.clock)
            running.append(_Contestant(service, load, Measured(strategy=strategy)))
        try:
            for one in running:
                await one.begin()
                advance()
            for turn in range(round(plan.seconds_of(cell) / plan.stretch_s) + 1):
                # Back and forth, so that a machine that becomes slower and slower is fair, too.
                for one in running[:: 1 if turn % 2 == 0 else -1]:
                    await one.go_on(plan.stretch_s)
            return [one.result() for one in running]
        finally:
            for one in running:
                await one.end()


class _Contestant:
    def __init__(self, service: HeldService, load: RunningLoad, measured: Measured) -> None:
        self._service, self._load, self._measured = service, load, measured

    async def begin(self) -> None:
        """Have its first requests answered, and then hold it."""
        try:
            await self._service.client.forget()
            await self._load.begin()
        except outrider.OutriderError as error:
            self._measured.error = str(error)
        await self._service.hold()

    async def go_on(self, seconds: float) -> None:
        """Let it decode for a stretch, and the pass that is under way then to its end."""
        if self._measured.error:
            return
        await self._service.go()
        try:
            await self._load.go_on(seconds)
        except outrider.OutriderError as error:
            self._measured.error = str(error)
        await self._service.hold()

    def result(self) -> Measured:
        if not self._measured.error:
            self._measured.record = self._load.record()
        return self._measured

    async def end(self) -> None:
        await self._load.stop()
        await self._service.go()


def _shape(cell: GridCell, strategy: str, plan: RoundPlan) -> LoadShape:
    return LoadShape(
        at_once=cell.at_once,
        strategy=strategy,
        temperature=cell.temperature,
        seconds=plan.seconds_of(cell),
        lead_s=plan.lead_s,
    )
