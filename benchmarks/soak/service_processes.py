"""A whole service, each component in a process of its own, with relays between them that fail by order.

::

    users -> relays -> routers -> a relay each -> verifiers -> relay -> drafters -> relay -> retrieval -> relay -> Redis
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.component import ComponentSpec
from benchmarks.soak.component_process import ComponentProcess, Start, started_anew
from benchmarks.soak.free_port import free_port
from benchmarks.soak.mortal_redis import MortalRedis
from benchmarks.soak.relay import Relay
from cluster.models.target import ResolvedModel

# Who stands in front of whom; users come last.
CHAIN = ("retrieval", "drafter", "verifier", "router")
# What a component that holds nothing tells of itself.
_HELD = (
    "outrider_num_requests_open",
    "outrider_num_requests_running",
    "outrider_num_requests_waiting",
    "outrider_kv_cache_usage_ratio",
    "outrider_drafter_sessions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLayout:
    """What a service is made of.

    Attributes:
        replicas: how many of each of ``CHAIN``.
        start_component: starts a component's process.
        logs: a folder for what components say; None: the terminal.
        seed: of the relays' jitter.
    """

    model: ResolvedModel
    flags: tuple[str, ...]
    replicas: Mapping[str, int]
    config: Path | None = None
    redis: MortalRedis | None = None
    start_component: Start = started_anew
    logs: Path | None = None
    seed: int = 0


class ServiceProcesses:
    """The service of a layout.

    Attributes:
        relays: lists of them by what they stand in front of: a component, "http" (the routers' other port) or "redis".
        processes: by component.
        web_ports: the routers' own ports of HTTP.
    """

    def __init__(self, layout: ServiceLayout) -> None:
        self.layout = layout
        self.relays: dict[str, list[Relay]] = {}
        self.processes: dict[str, list[ComponentProcess]] = {}
        self.web_ports: list[int] = []

    async def start(self) -> None:
        """Start everything; what a failed start leaves behind, ``stop`` ends."""
        layout, flags = self.layout, list(self.layout.flags)
        if (redis := layout.redis) is not None:
            (to_redis,) = await self._relay("redis", [[redis.port]])
            flags.append(f"retrieval.redis_url={redis.url.replace(str(redis.port), str(to_redis.port))}")
        upstream: tuple[int, ...] = ()
        for role in CHAIN:
            ports = [free_port() for _ in range(layout.replicas[role])]
            if not ports:
                continue
            web = [free_port() for _ in ports] if role == "router" else []
            self.web_ports = web
            own: list[tuple[str, ...]] = [(f"server.http_port={port}", "server.ops_port=0") for port in web]
            self.processes[role] = [
                ComponentProcess(
                    self._spec(role, port, upstream, (*flags, *each)),
                    layout.start_component,
                    None if layout.logs is None else layout.logs / f"{role}-{number}.log",
                )
                for number, (port, each) in enumerate(zip(ports, own or [()] * len(ports), strict=True))
            ]
            # Routers choose among verifiers; all others take who accepts.
            backends = [[port] for port in ports] if role == "verifier" else [ports]
            upstream = tuple(relay.port for relay in await self._relay(role, backends))
            if web:
                await self._relay("http", [web])
        for process in self.everybody:
            process.launch()
        for process in self.everybody:
            await process.ready()

    def _spec(self, role: str, port: int, upstream: tuple[int, ...], flags: tuple[str, ...]) -> ComponentSpec:
        model = self.layout.model
        return ComponentSpec(
            role=role,
            port=port,
            upstream=upstream,
            model=(model.name, str(model.path)),
            flags=flags,
            config=None if self.layout.config is None else str(self.layout.config),
        )

    async def _relay(self, name: str, backends: Sequence[list[int]]) -> list[Relay]:
        self.relays[name] = [Relay(ports, self.layout.seed) for ports in backends]
        for relay in self.relays[name]:
            await relay.start()
        return self.relays[name]

    async def stop(self) -> None:
        """End all processes and relays."""
        for process in self.everybody:
            if process.lives:
                process.thaw()
                process.kill()
        for relay in itertools.chain(*self.relays.values()):
            await relay.stop()

    @property
    def everybody(self) -> Iterator[ComponentProcess]:
        """All processes, whom others need before these."""
        return itertools.chain(*self.processes.values())

    @property
    def address(self) -> str:
        """Where gRPC is answered."""
        return f"127.0.0.1:{self.relays['router'][0].port}"

    @property
    def http_address(self) -> str:
        """Where HTTP is answered."""
        return f"127.0.0.1:{self.relays['http'][0].port}"

    async def held(self) -> dict[str, float]:
        """What components hold for requests and tell of: requests, blocks of the cache, sessions; none where all is free."""
        found: dict[str, float] = {}
        for role, processes in self.processes.items():
            for number, process in enumerate(processes):
                numbers = await process.numbers()
                found |= {f"{role} {number}: {name.removeprefix('outrider_')}": numbers.get(name, 0.0) for name in _HELD}
        return {name: value for name, value in found.items() if value}

    async def settled_files(self, few: Mapping[str, float] | None = None, within_s: float = 0.0) -> dict[str, int]:
        """Open descriptors of every process, by component and number, while nobody asks anything.

        Args:
            few: how many a process of a component may have; those that have more get ``within_s`` to close them.
        """
        names = [f"{role} {number}" for role, several in self.processes.items() for number in range(len(several))]
        most = [(few or {}).get(name.split()[0], math.inf) for name in names]
        settling = asyncio.gather(
            *(process.settled_files(each, within_s) for process, each in zip(self.everybody, most, strict=True))
        )
        # The users are in this process: their calls, too, end when they are collected. Once for all, since it takes a while.
        while not settling.done():
            gc.collect()
            await asyncio.wait([settling], timeout=1.0)
        return dict(zip(names, settling.result(), strict=True))

    async def until_free(self, seconds: float) -> dict[str, float]:
        """Wait until nothing is held any more, at most so long; what is held then."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + seconds
        held = await self.held()
        while held and clock() < ends_at:
            await asyncio.sleep(0.5)
            held = await self.held()
        return held
