"""The chaos matrix's first arrangement: components in processes of their own, with relays between them that fail by order.

::

    users -> relay -> 2 routers -> relay -> 2 verifiers -> relay -> drafter -> relay -> retrieval -> Redis
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import outrider
from retrieval_index.embedded import embedded_redis
from retrieval_index.store import IndexStore
from services.model_files.folder import tokenizer_digest
from tests.chaos.cells import CHAIN, OF_NETWORKS, REPLICAS, Plan, options
from tests.chaos.component_process import ComponentProcess
from tests.chaos.relay import Relay
from tests.indexes import ScoringTarget
from tests.indexes import build as build_bytes_index
from tests.ports import free_port
from tests.service import tiny_settings


@contextmanager
def published_index(model: Path, folder: Path) -> Iterator[str]:
    """Redis with an index for the model; gives its URL."""
    target = ScoringTarget(name="tiny", tokenizer_sha256=tokenizer_digest(model), vocab_size=320)
    build_bytes_index(folder / "index", ["the quick brown fox jumps over the lazy dog " * 4, "()*+" * 30], target=target)
    with embedded_redis() as url:
        with IndexStore(url, "default") as store:
            store.publish(folder / "index")
        yield url


class InProcesses:
    """Implements ``Arrangement``: all components, each in a process of its own, with relays between them."""

    place = "processes"

    def __init__(self, model: Path, redis_url: str, cache: Path, seed: int) -> None:
        self._redis_url = redis_url
        self._flags = tiny_settings(f"cache_dir={cache}", "verifier.draft_deadline_s=0.05")
        self.relays: dict[str, Relay] = {}
        self.processes: dict[str, list[ComponentProcess]] = {}
        self._model, self._seed = model, seed

    async def start(self) -> None:
        redis_port = urlsplit(self._redis_url).port
        assert redis_port is not None
        to_redis = await self._relay("redis", [redis_port])
        flags = [*self._flags, f"retrieval.redis_url={self._redis_url.replace(str(redis_port), str(to_redis.port))}"]
        upstream = 0
        for role in CHAIN:
            ports = [free_port() for _ in range(REPLICAS[role])]
            self.processes[role] = [ComponentProcess(role, port, upstream, self._model, flags) for port in ports]
            upstream = (await self._relay(role, ports)).port
        everything = list(itertools.chain(*self.processes.values()))
        for process in everything:
            process.launch()
        for process in everything:
            await process.ready()
        # A router may have found no verifier yet.
        async with outrider.AsyncClient(self.address, retry=outrider.Retry(attempts=20)) as client:
            await client.generate(**options("greedy"))

    async def _relay(self, name: str, ports: list[int]) -> Relay:
        relay = self.relays[name] = Relay(ports, self._seed)
        await relay.start()
        return relay

    async def stop(self) -> None:
        for process in itertools.chain(*self.processes.values()):
            process.thaw()
            process.kill()
        for relay in self.relays.values():
            await relay.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.relays['router'].port}"

    async def fail(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        cell = plan.cell
        if cell.fault in OF_NETWORKS:
            relay = self.relays[cell.component]
            ways = {"cut": relay.cut, "stalled": relay.stall, "slow": lambda: relay.slow(0.02, 0.03)}
            ways[cell.fault]()
            await asyncio.sleep(plan.lasts_s)
            relay.heal()
            return
        replicas = self.processes[cell.component]
        process = replicas[plan.victim % len(replicas)]
        if cell.fault == "killed":
            await process.replace()
        elif cell.fault == "frozen":
            process.freeze()
            await asyncio.sleep(plan.lasts_s)
            process.thaw()
        elif cell.fault == "hung":
            process.freeze()
            await streams_ended.wait()
            await process.replace()
        else:
            process.fill_disk()
            await asyncio.sleep(plan.lasts_s)
            process.empty_disk()


@asynccontextmanager
async def arranged(model: Path, seed: int = 0) -> AsyncIterator[InProcesses]:
    """A running arrangement."""
    with tempfile.TemporaryDirectory() as folder, published_index(model, Path(folder)) as url:
        arrangement = InProcesses(model, url, Path(folder) / "cache", seed)
        try:
            await arrangement.start()
            yield arrangement
        finally:
            await arrangement.stop()
