"""The chaos matrix's first arrangement: components in processes of their own, with relays between them that fail by order.

::

    users -> relay -> 2 routers -> a relay each -> 2 verifiers -> relay -> drafter -> relay -> retrieval -> relay -> Redis

The routers' ports speak TLS, and ask for keys. The others know each other by certificates.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx2
from typing_extensions import override

import outrider
from benchmarks.soak.published_index import published_index
from benchmarks.soak.service_processes import ServiceLayout, ServiceProcesses
from cluster.models.target import ResolvedModel
from tests.chaos import lacks
from tests.chaos.cells import OF_NETWORKS, OVERLOAD, REPLICAS, Plan, options
from tests.chaos.lacks import TAKES
from tests.chaos.reloads import TEXTS, Reloads
from tests.chaos.users import STREAM_S
from tests.servers.component_forks import forked
from tests.servers.service import tiny_settings

# What was held for requests that are gone must be free within this time, sessions of a drafter that heard nothing included.
FREE_S, SILENCE_S = 60.0, 10


def tiny(model: Path) -> ResolvedModel:
    """The tiny model as a service's own."""
    return ResolvedModel(name="tiny", path=model)


class InProcesses(ServiceProcesses):
    """Implements ``Arrangement``: all components, each in a process of its own, with relays between them."""

    place = "processes"

    def __init__(self, layout: ServiceLayout, reloads: Reloads) -> None:
        super().__init__(layout)
        self._reloads = reloads

    @override
    async def start(self) -> None:
        await super().start()
        # A router may have found no verifier yet.
        async with self.client(attempts=20) as client:
            await client.generate(**options("greedy"))

    def client(self, attempts: int = 1) -> outrider.AsyncClient:
        reloads, retry = self._reloads, outrider.Retry(attempts=attempts)
        return outrider.AsyncClient(
            self.address, api_key=reloads.key, tls=True, root_certificates=reloads.roots, retry=retry
        )

    def web(self) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self._reloads.key}"}
        url = f"https://{self.http_address}"
        return httpx2.AsyncClient(base_url=url, headers=headers, verify=self._reloads.context(), timeout=STREAM_S)

    async def fail(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        replacing = asyncio.create_task(self._replaced(plan.cell.beside))
        await self._broken(plan, streams_ended)
        await replacing

    async def _replaced(self, what: str) -> None:
        if what.startswith("new"):
            # While the fault lasts: they last half a second at least.
            await asyncio.sleep(0.1)
            await self._reloads.replace(what)

    async def _broken(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        cell = plan.cell
        if cell.fault in OF_NETWORKS:
            await self._network_broken(plan)
        elif cell.component == "redis":
            assert self.layout.redis is not None
            self.layout.redis.kill()
            await asyncio.sleep(plan.lasts_s)
            await asyncio.to_thread(self.layout.redis.start)
        else:
            await self._process_broken(plan, streams_ended)

    async def _network_broken(self, plan: Plan) -> None:
        relays = self.relays[plan.cell.component]
        for relay in relays:
            {"cut": relay.cut, "stalled": relay.stall, "slow": lambda relay=relay: relay.slow(0.02, 0.03)}[plan.cell.fault]()
        await asyncio.sleep(plan.lasts_s)
        for relay in relays:
            relay.heal()

    async def _process_broken(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        replicas = self.processes[plan.cell.component]
        process = replicas[plan.victim % len(replicas)]
        if plan.cell.fault == "killed":
            await process.replace()
        elif plan.cell.fault == "hung":
            process.freeze()
            await streams_ended.wait()
            await process.replace()
        else:
            take, give = TAKES[plan.cell.fault]
            take(process)
            await asyncio.sleep(plan.lasts_s)
            give(process)

    async def unsettled(self, plan: Plan) -> list[str]:
        left = [f"the {process.role} has ended by itself" for process in self.everybody if process.ended]
        if left:
            return left
        left += [f"{name} is still {value:g}" for name, value in (await self.until_free(FREE_S)).items()]
        if plan.cell.beside not in ("", OVERLOAD):
            left += await self._reloads.unused(plan.cell.beside, self)
        return left


@asynccontextmanager
async def arranged(model: Path, seed: int = 0) -> AsyncIterator[InProcesses]:
    """A running arrangement."""
    with tempfile.TemporaryDirectory() as name, published_index(tiny(model), TEXTS, Path(name)) as redis:
        reloads = Reloads(Path(name), tiny(model), redis)
        settings = tiny_settings(
            f"cache_dir={name}/cache", "verifier.draft_deadline_s=0.05", "verifier.max_waiting=8",
            f"drafter.session_silence_s={SILENCE_S}", *reloads.flags,
        )  # fmt: skip
        layout = ServiceLayout(
            model=tiny(model), flags=tuple(settings), replicas=REPLICAS, redis=redis,
            start_component=partial(forked, main=lacks.main), seed=seed,
        )  # fmt: skip
        arrangement = InProcesses(layout, reloads)
        try:
            await arrangement.start()
            yield arrangement
        finally:
            await arrangement.stop()
