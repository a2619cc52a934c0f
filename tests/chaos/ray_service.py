"""The chaos matrix's second arrangement: the service on a local Ray, whose processes are killed and stopped by their ids.

::

    users -> 2 routers on one port -> Serve -> 2 verifiers of 2 stages -> drafter -> retrieval -> Redis
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

import outrider
from benchmarks.soak.published_index import published_index
from tests.chaos.cells import Plan, options
from tests.chaos.in_processes import tiny
from tests.chaos.reloads import TEXTS
from tests.running.ports import free_port
from tests.servers.on_ray import Service
from tests.servers.service import tiny_settings

REPLICAS = {"router": 2, "verifier": 2, "stage": 2, "drafter": 1, "retrieval": 1}
# How their command lines begin, or what they contain.
_TITLES = {role: f"ray::ServeReplica:outrider:{role}" for role in REPLICAS} | {
    "stage": "ray::Stage",
    "controller": "ray::ServeController",
    "agent": "ray::DashboardAgent",
    "raylet": "raylet/raylet",
    "gcs_server": "gcs/gcs_server",
}
# A service that has ended is started again by whoever watches it, and everything is there again within this time.
_WHOLE_S = 180.0


class OnRay:
    """Implements ``Arrangement``: the service on a Ray of its own.

    Attributes:
        said: what the service has said on its way out, each time that it ended by itself.
    """

    place = "ray"

    def __init__(self, model: Path, redis_url: str, cache: Path) -> None:
        self._model = model
        self._port = free_port()
        self._flags = tiny_settings(
            f"cache_dir={cache}", f"server.port={self._port}", f"retrieval.redis_url={redis_url}", "verifier.drain_s=1",
            "server.drain_delay_s=0", "server.drain_grace_s=1", "router.replicas=2", "verifier.replicas=2", "verifier.stages=2",
            "verifier.num_cpus=0.1", "router.num_cpus=0.1", "drafter.num_cpus=0.1", "retrieval.num_cpus=0.1",
        )  # fmt: skip
        self._ray: dict[str, str] = {}
        self._replicas = REPLICAS
        self._service: Service | None = None
        self._all: list[psutil.Process] = []
        self.said: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Start it, and wait until all of it is there."""
        self._service = await asyncio.to_thread(Service, self._model, self._flags, subprocess.PIPE, self._ray)
        await self._whole()
        async with outrider.AsyncClient(self.address, retry=outrider.Retry(attempts=20)) as client:
            await client.generate(**options("greedy"))

    def client(self) -> outrider.AsyncClient:
        return outrider.AsyncClient(self.address, retry=outrider.Retry(attempts=1))

    def web(self) -> None:
        """HTTP's port is any free one, which another router or another life has not."""

    async def unsettled(self, plan: Plan) -> list[str]:
        """``fail`` waits until all of it is there again; what it holds is not looked at."""
        return []

    async def stop(self) -> None:
        if self._service is not None and self._service.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._service.stop)
        self._clear()

    async def fail(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        running = self._processes(plan.cell.component)
        assert running, f"no {plan.cell.component} runs"
        victim = running[plan.victim % len(running)]
        if plan.cell.fault == "killed":
            victim.kill()
        else:
            victim.send_signal(signal.SIGSTOP)
            if plan.cell.fault == "frozen":
                await asyncio.sleep(plan.lasts_s)
                victim.send_signal(signal.SIGCONT)
            else:
                await streams_ended.wait()
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
        await self._whole()

    def _processes(self, component: str) -> list[psutil.Process]:
        """Those of this component that run, in the order in which they were started."""
        assert self._service is not None
        found = []
        with suppress(psutil.NoSuchProcess):
            self._all = psutil.Process(self._service.process.pid).children(recursive=True)
        for process in self._all:
            with suppress(psutil.Error):
                if _TITLES[component] in " ".join(process.cmdline()[:3]):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    async def _whole(self) -> None:
        """Wait until every replica serves; start the service again if it has ended."""
        assert self._service is not None
        deadline = time.monotonic() + _WHOLE_S
        complete = {name: {"RUNNING": count} for name, count in self._replicas.items() if name != "stage"}
        while time.monotonic() < deadline:
            # What has killed Ray is noticed after a moment; until then its controller may still say that all is well.
            await asyncio.sleep(1.0)
            if self._service.process.poll() is not None:
                assert self._service.process.stderr is not None
                self.said.append(" ".join(self._service.process.stderr.read().split())[-400:])
                self._clear()
                await self._start_again(deadline)
                return
            with suppress(AssertionError, BrokenPipeError, ValueError):
                states = await asyncio.to_thread(self._service.states)
                if states == complete and len(self._processes("stage")) == self._replicas.get("stage", 0):
                    return
        raise TimeoutError(f"not all of the service is there again after {_WHOLE_S:g} s")

    async def _start_again(self, deadline: float) -> None:
        """What has died may hold ports for a moment: whoever watches the service tries again."""
        while True:
            try:
                await self.start()
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(2.0)

    def _clear(self) -> None:
        """End what a service that died may have left behind."""
        for process in self._all:
            with suppress(psutil.Error):
                process.kill()


@asynccontextmanager
async def arranged_on_ray(model: Path) -> AsyncIterator[OnRay]:
    """A running arrangement."""
    with tempfile.TemporaryDirectory() as folder, published_index(tiny(model), TEXTS, Path(folder)) as redis:
        arrangement = OnRay(model, redis.url, Path(folder) / "cache")
        try:
            await arrangement.start()
            yield arrangement
        finally:
            await arrangement.stop()
            for line in arrangement.said:
                print(f"the service said: {line}", flush=True)
