"""Faults at random times: processes are killed and stopped, networks are cut, stalled and slowed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.soak.relay import Relay
from benchmarks.soak.service_processes import ServiceProcesses

OF_NETWORKS = ("cut", "stalled", "slow")
_LEAST_S, _MOST_S = 0.3, 3.0
_SLOW_S = (0.02, 0.03)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakFault:
    """A fault that has happened, ``at_s`` seconds after the users began."""

    at_s: float
    component: str
    kind: str
    lasted_s: float


class RandomFaults:
    """Breaks a service, again and again. The first replica of each component is never killed, so that it has a long life.

    Args:
        every_s: mean time between two faults.
        seed: of times, kinds and victims.
    """

    def __init__(self, service: ServiceProcesses, every_s: float, seed: int) -> None:
        self._service, self._every_s = service, every_s
        self._random = random.Random(seed)
        self._hit: Counter[str] = Counter()

    async def run(self, told: Callable[[SoakFault], None], seconds: float) -> None:
        """Break things for so long, and wait until all is mended."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.TaskGroup() as group:
            while (pause := self._random.expovariate(1 / self._every_s)) + clock() < began + seconds:
                await asyncio.sleep(pause)
                component, kind = self._chosen()
                fault = SoakFault(
                    at_s=clock() - began, component=component, kind=kind, lasted_s=self._random.uniform(_LEAST_S, _MOST_S)
                )
                # One fault of a component at a time; those of several may overlap.
                if not self._hit[component]:
                    told(fault)
                    group.create_task(self._happen(fault))

    def _chosen(self) -> tuple[str, str]:
        """Every component as often as every other, and of its faults each."""
        component = self._random.choice(sorted(self._service.relays))
        kinds = list(OF_NETWORKS)
        if component == "redis":
            kinds += ["killed"] * 2
        elif (replicas := self._service.processes.get(component)) is not None:
            kinds += ["stopped"] * 2 + ["killed"] * (3 if len(replicas) > 1 else 0)
        return component, self._random.choice(kinds)

    async def _happen(self, fault: SoakFault) -> None:
        self._hit[fault.component] += 1
        try:
            if fault.kind in OF_NETWORKS:
                await _of_network(self._random.choice(self._service.relays[fault.component]), fault)
                return
            if fault.component == "redis":
                await self._kill_redis(fault.lasted_s)
                return
            replicas = self._service.processes[fault.component]
            if fault.kind == "killed":
                await self._random.choice(replicas[1:]).replace()
                return
            victim = self._random.choice(replicas)
            victim.freeze()
            await asyncio.sleep(fault.lasted_s)
            victim.thaw()
        finally:
            self._hit[fault.component] -= 1

    async def _kill_redis(self, seconds: float) -> None:
        redis = self._service.layout.redis
        assert redis is not None
        redis.kill()
        await asyncio.sleep(seconds)
        await asyncio.to_thread(redis.start)


async def _of_network(relay: Relay, fault: SoakFault) -> None:
    if fault.kind == "slow":
        relay.slow(*_SLOW_S)
    else:
        {"cut": relay.cut, "stalled": relay.stall}[fault.kind]()
    await asyncio.sleep(fault.lasted_s)
    relay.heal()
