"""One run: builds the service of a schedule, lets it happen, waits for calm, and has it judged."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from cluster.ray.open_streams import OpenStreams
from services.verifier.engine.config import LoopConfig
from speculation import limits
from tests.simulation import judge
from tests.simulation.assets import assets
from tests.simulation.calm import unsettled
from tests.simulation.changes import Change, resume_once_more
from tests.simulation.components import Component, DrafterMachine, RetrievalMachine, RouterMachine, VerifierMachine
from tests.simulation.events import happen, restart
from tests.simulation.fault_points import FaultPoints
from tests.simulation.grpc_streams import Servers
from tests.simulation.inside import drafts_watched
from tests.simulation.network import Network
from tests.simulation.patched import simulated
from tests.simulation.schedule import OTHER_WEIGHTS, RETRIEVAL, ROUTERS, TENANTS, VERIFIERS, Schedule
from tests.simulation.serve_handles import Handle
from tests.simulation.simulated_redis import SimulatedRedis
from tests.simulation.tenant_keys import TenantKeys
from tests.simulation.users import Call, user
from tests.simulation.virtual_loop import Deadlock, Endless, VirtualLoop

# Seconds within which every user has an end, and all is calm after the last one's.
_ENDS_S, _CALM_S = 900.0, 400.0
# What a router lets verifiers have for joining a pause, and for answering.
_LOST_S = limits.RELOAD_S + 30.0
# Serve asks so often whether a replica is well, and gives it up after so long a silence.
_HEALTH_S, _SILENT_S = 10.0, 30.0
# How often Kubernetes asks routers.
_PROBE_S = 1.0
# Garbage is collected after so many runs: after each it takes as long as a part of the run, and that of hundreds is found
# in memory instead of in the processor's cache.
_COLLECTED, _RUNS = 8, count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run has shown.

    Attributes:
        problems: what the judge has found; empty: nothing.
        counts: how the calls ended, and what happened.
    """

    problems: tuple[str, ...]
    counts: Counter[str]
    fired: Counter[str]
    reached: Counter[str]
    seconds: float


class World:
    """The whole service, and its users.

    Attributes:
        calls: what users saw.
        faults: spans of time in which something was wrong, as (begin, end).
        problems: what was found while it ran.
        disturbing: how many events last at present.
        pauses, reloads: what operators have asked for.
        operated: there are operators, and so there is what they rely on.
    """

    def __init__(self, schedule: Schedule, loop: VirtualLoop) -> None:
        self.schedule, self.loop = schedule, loop
        setup, seed = schedule.setup, schedule.seed
        self.points = FaultPoints(schedule.points, seed, loop.time)
        self.network = Network(loop, seed, setup.delay_s)
        self.servers = Servers()
        self.redis = SimulatedRedis(loop, self.points)
        self.calls: list[Call] = []
        self.faults: list[tuple[float, float]] = []
        self.problems: list[str] = []
        self.disturbing = 0
        self.counts: Counter[str] = Counter()
        self.revoked: dict[str, float] = {}
        self.pauses: list[Change] = []
        self.reloads: list[Change] = []
        self.operated = any(event.kind in ("pause", "reload") for event in schedule.events)
        self.keys = TenantKeys(setup)
        self.retrieval = [RetrievalMachine(RETRIEVAL, loop, self.servers)] if setup.retrieval else []
        self.drafters = [self._drafter(kind) for kind in setup.drafters]
        self.verifiers = [self._verifier(name) for name in VERIFIERS]
        self.routers = [self._router(name) for name in ROUTERS]

    @property
    def components(self) -> list[Component]:
        """All of them."""
        return [*self.retrieval, *self.drafters, *self.verifiers, *self.routers]

    def replicas(self) -> dict[str, int]:
        """How many replicas of each deployment Serve knows."""
        found = {"verifier": self.verifiers, "drafter": self.drafters}
        return {name: sum(each.listed for each in machines) for name, machines in found.items()}

    def named(self, name: str) -> Component:
        """A component."""
        return next(each for each in self.components if each.name == name)

    def _drafter(self, kind: str) -> DrafterMachine:
        retrieval = RETRIEVAL if self.retrieval else None
        return DrafterMachine(kind, self.loop, self.network, self.servers, self.points, kind, retrieval, self.schedule.seed)

    def _verifier(self, name: str) -> VerifierMachine:
        setup = self.schedule.setup
        config = LoopConfig(
            max_num_seqs=setup.max_num_seqs,
            max_waiting=setup.max_waiting,
            max_wait_s=setup.max_wait_s,
            max_batched_tokens=setup.max_batched_tokens,
            pass_deadline_s=5.0,
        )
        return VerifierMachine(
            name, self.loop, self.network, self.servers, self.points, setup.drafters, config,
            blocks=setup.blocks, measured=setup.measured, pass_s=setup.pass_s,
            weights=OTHER_WEIGHTS if setup.two_weights and name != VERIFIERS[0] else 0,
            kept_states=setup.kept_states, stages=setup.stages, tell=self.problems.append, others=self._others if self.operated else None,
        )  # fmt: skip

    def _others(self) -> Handle:
        """A verifier's handle of all verifiers."""
        return Handle("verifier", lambda: self.verifiers, self.network, self.points, OpenStreams())

    def disturbed(self, begin: float, end: float) -> bool:
        """Whether any fault was at work in a span of time: an event, or a point that fired."""
        points = any(begin <= at <= end for at, _ in self.points.when)
        return points or self.disturbing > 0 or any(span[1] >= begin and span[0] <= end for span in self.faults)

    def _router(self, name: str) -> RouterMachine:
        setup = self.schedule.setup
        records = [self.keys.record(tenant) for tenant in TENANTS]

        def handles(streams: OpenStreams) -> tuple[Any, Any]:
            made = [("verifier", lambda: self.verifiers), ("drafter", lambda: self.drafters)]
            return tuple(Handle(kind, of, self.network, self.points, streams) for kind, of in made)  # type: ignore

        return RouterMachine(name, self.loop, records, handles, retrieval=setup.retrieval, timeout_s=setup.timeout_s)

    async def run(self) -> None:
        """Everything, until all is calm again."""
        for folder in assets().indexes if self.retrieval else ():
            self.redis.publish(folder)
        for component in self.components:
            await component.start()
        keeping = [
            asyncio.create_task(each) for each in (self._replace_the_sick(), *((self._probe(),) if self.operated else ()))
        ]
        happening = [asyncio.create_task(happen(self, event)) for event in self.schedule.events]
        users = [asyncio.create_task(user(self, number, ask)) for number, ask in enumerate(self.schedule.asks)]
        if users:
            _, late = await asyncio.wait(users, timeout=_ENDS_S)
            if late:
                self.problems.append(f"{len(late)} users have no end after {_ENDS_S:g} s")
            for task in late:
                task.cancel()
        if happening:
            await asyncio.wait(happening)
        self.points.quiet = True
        for verifier in self.verifiers:
            verifier.target.fail_next = verifier.target.lose_next = False
            verifier.worker.hang_s = 0.0
        await resume_once_more(self)
        await self._calm_down()
        for task in keeping:
            task.cancel()
        await self._last_words()
        await self._calm_down()

    async def _replace_the_sick(self) -> None:
        """What Serve's controller does."""
        frozen_s: Counter[str] = Counter()
        while True:
            await asyncio.sleep(_HEALTH_S)
            for verifier in self.verifiers:
                frozen_s[verifier.name] = frozen_s[verifier.name] + int(_HEALTH_S) if verifier.process.frozen else 0
                if not verifier.up:
                    continue
                sick = frozen_s[verifier.name] >= _SILENT_S
                try:
                    await verifier.methods.check_health()
                except RuntimeError:
                    sick = True
                if sick:
                    self.counts["replaced by Serve"] += 1
                    await restart(self, verifier, 1.0)

    async def _probe(self) -> None:
        """Ask routers whether they are ready, as Kubernetes does."""
        while True:
            await asyncio.sleep(_PROBE_S)
            for router in self.routers:
                if router.up:
                    self.loop.start(router.process, router.service.ready())

    async def _calm_down(self) -> None:
        """Wait until nothing is held any more; what still is after a long time never will be free."""
        waited, pause = 0.0, 0.05
        # A router waits so long for a verifier to which a question was lost.
        most_s = _CALM_S + (_LOST_S if self.operated and self.points.fired["serve: a question is lost"] else 0.0)
        while (held := unsettled(self)) and waited < most_s:
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(20.0, 2 * pause)
        self.problems += [f"still held after {waited:.0f} calm seconds: {what}" for what in held]

    async def _last_words(self) -> None:
        """One more request at each router: all has recovered without a hand. After every fourth run, since it takes time."""
        asks = () if self.schedule.seed % 4 else self.schedule.asks
        for number, router in enumerate(self.routers):
            if not asks or self.problems:
                return
            ask = replace(
                asks[0],
                at_s=0.0,
                tenant="a",
                router=number,
                prompt=asks[0].prompt[-2:],
                max_tokens=2,
                leaves_after=None,
                patience_s=None,
                grammar=None,
            )
            before = len(self.calls)
            record = self.keys.record("a")
            router.keys._records[record.hash] = record
            await user(self, len(asks) + number, ask)
            if self.calls[before].outcomes != ["ok"]:
                self.problems.append(f"after all faults {router.name} answers {self.calls[before].outcomes}")


def run(schedule: Schedule) -> Result:
    """Let a schedule happen, in this thread, in virtual time, and judge it."""
    with undisturbed():
        return happened(schedule)


def happened(schedule: Schedule) -> Result:
    """As ``run``, for many within one ``undisturbed``."""
    # What an earlier run fetched, this one fetches again: disks are empty at first.
    shutil.rmtree(assets().cache, ignore_errors=True)
    loop = VirtualLoop(schedule.seed)
    world = World(schedule, loop)
    with simulated(loop, schedule.seed, world.redis, world.replicas), drafts_watched(world.problems.append):
        try:
            loop.run_until_complete(world.run())
        except (Deadlock, Endless) as error:
            world.problems.append(f"{type(error).__name__}: {error}")
        found = [*world.problems, *judge.problems(world), *loop.errors]
    counts = world.counts + Counter(outcome for call in world.calls for outcome in call.outcomes)
    points = world.points
    shown = Result(problems=tuple(found), counts=counts, fired=points.fired, reached=points.reached, seconds=loop.time())
    loop.bury()
    del loop, world
    if next(_RUNS) % _COLLECTED == 0:
        gc.collect()
    return shown


@contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage in mid-run, which would end coroutines of dead processes; and no logs."""
    assets()
    collects, hook, frozen = gc.isenabled(), sys.unraisablehook, gc.get_freeze_count()
    gc.disable()
    # What was there before is looked at no more: it takes longer than a run.
    gc.freeze()
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
    finally:
        # What still waited is dropped here, where nobody is told of it.
        gc.collect()
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)
        # Under pytest all modules are frozen, and stay so.
        if not frozen:
            gc.unfreeze()
        if collects:
            gc.enable()
