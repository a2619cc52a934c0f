"""One component in a process of its own, for tests that kill, freeze and replace it:
``python -m tests.chaos.component_process ROLE PORT UPSTREAM MODEL FLAGS``."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import build
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings, load

TOKEN = "a shared secret of ours"


class ComponentProcess:
    """A process that serves ``role`` on ``port`` and talks to what is behind port ``upstream`` (0: to nobody)."""

    def __init__(self, role: str, port: int, upstream: int, model: Path, flags: Sequence[str]) -> None:
        self.role, self.port = role, port
        self._command = [
            sys.executable, "-m", "tests.chaos.component_process",
            role, str(port), str(upstream), str(model), json.dumps(list(flags)),
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None

    def launch(self) -> None:
        """Start it; ``ready`` waits until it serves."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)

    async def ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line.strip() == "serving", f"{self.role} has not started"

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    async def replace(self) -> None:
        """Kill it, and start another one in its place."""
        self.kill()
        self.launch()
        await self.ready()

    def fill_disk(self) -> None:
        """From now on no file of its can grow, as on a full disk."""
        self._limit_files(0)

    def empty_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        assert self._process is not None
        _, most = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, most))

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a component is made from, where it serves, and whom it talks to."""

    settings: Settings
    model: ResolvedModel
    address: str
    upstream: str

    async def resolve(self) -> str:
        return self.upstream


async def _retrieval(place: _Place) -> object:
    from services.links.grpc_retrieval import serve_retrieval
    from services.retrieval.service import RetrievalService

    service = RetrievalService(build.retrieval_config(place.settings, place.model))
    await service.start()
    return await serve_retrieval(service, place.address, TOKEN)


async def _drafter(place: _Place) -> object:
    from services.drafter.service import DrafterService
    from services.links.grpc_draft import serve_drafter
    from services.links.grpc_retrieval import GrpcRetrievalLink

    link = GrpcRetrievalLink(place.resolve, TOKEN)
    await link.start()
    service = DrafterService(build.drafter_config(place.settings, place.model), link)
    await service.start()
    return await serve_drafter(service, place.address, TOKEN, place.settings.drafter.session_silence_s)


async def _verifier(place: _Place) -> object:
    from services.links.grpc_draft import GrpcDraftLink
    from services.verifier.service import VerifierService
    from tests.grpc_verifier import serve_verifier

    origins = await build.origins(place.settings, place.model, GrpcDraftLink(place.resolve, TOKEN))
    service = VerifierService(build.verifier_config(place.settings, place.model), origins)
    await service.start()
    return await serve_verifier(service, place.address)


async def _router(place: _Place) -> object:
    from services.api.grpc.server import serve_public
    from services.router.service import RouterService
    from tests.grpc_verifier import GrpcVerifierLink

    service = RouterService(build.router_config(place.settings, place.model), GrpcVerifierLink(place.upstream))
    return await serve_public(service, build.server_config(place.settings))


_START: dict[str, Callable[[_Place], Awaitable[object]]] = {
    "retrieval": _retrieval,
    "drafter": _drafter,
    "verifier": _verifier,
    "router": _router,
}


async def _serve(role: str, port: int, upstream: int, model: str, flags: Sequence[str]) -> None:
    place = _Place(
        settings=load(flags=[*flags, f"server.port={port}"], environ={}),
        model=ResolvedModel(name="tiny", path=Path(model)),
        address=f"127.0.0.1:{port}",
        upstream=f"127.0.0.1:{upstream}",
    )
    # A server stops when nothing refers to it any more.
    serving = await _START[role](place)
    print("serving", flush=True)
    await asyncio.Event().wait()
    del serving


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5])))
