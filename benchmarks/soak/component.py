"""One component in a process of its own, without Ray: ``python -m benchmarks.soak.component SPEC``.

SPEC is a ``ComponentSpec`` as JSON. It says "serving" once it serves, and then does what its input says, a line each:
``numbers`` prints its metrics as JSON, ``collect`` collects its garbage. It ends when its input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from cluster import build
from cluster.models.target import ResolvedModel
from cluster.process.observing import Observing
from cluster.process.starting import begin_starting
from cluster.settings import component_configs
from cluster.settings.config import Settings, load
from cluster.settings.recognition import caller_tls, server_tls

# Between components of one run; they serve on loopback alone.
TOKEN = "a shared secret of ours"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentSpec:
    """What a component is made from, where it serves, and whom it talks to.

    Attributes:
        role: retrieval, drafter, verifier or router.
        port: where it serves gRPC.
        upstream: ports of those behind it; of several it chooses by itself.
        model: name and folder.
        flags: settings, as on a command line.
        config: a file with settings.
    """

    role: str
    port: int
    upstream: tuple[int, ...]
    model: tuple[str, str]
    flags: tuple[str, ...]
    config: str | None = None

    def written(self) -> str:
        """As JSON; ``read`` is the inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        return cls(**read)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def resolve(self) -> str:
        return f"127.0.0.1:{self.upstream[0]}"


@dataclass(frozen=True, slots=True)
class _Place:
    spec: ComponentSpec
    settings: Settings
    model: ResolvedModel
    observing: Observing


async def _retrieval(place: _Place) -> object:
    from services.links.grpc_retrieval import serve_retrieval
    from services.retrieval.service import RetrievalService

    service = RetrievalService(component_configs.retrieval_config(place.settings, place.model))
    await service.start()
    tls = server_tls(place.settings, "retrieval")
    return await serve_retrieval(place.observing.retrieval(service), place.spec.address, TOKEN, tls)


async def _drafter(place: _Place) -> object:
    from services.drafter.service import DrafterService
    from services.links.grpc_draft import serve_drafter
    from services.links.grpc_retrieval import GrpcRetrievalLink

    link = None
    if place.spec.upstream:
        link = GrpcRetrievalLink(place.spec.resolve, TOKEN, caller_tls(place.settings, "drafter"))
        await link.start()
    service = DrafterService(component_configs.drafter_config(place.settings, place.model), link)
    await service.start()
    silence_s, tls = place.settings.drafter.session_silence_s, server_tls(place.settings, "drafter")
    return await serve_drafter(place.observing.drafter(service), place.spec.address, TOKEN, silence_s, tls)


async def _verifier(place: _Place) -> object:
    from services.links.grpc_draft import GrpcDraftLink
    from services.links.grpc_verifier import serve_verifier
    from services.verifier.service import VerifierService

    link = GrpcDraftLink(place.spec.resolve, TOKEN, caller_tls(place.settings, "verifier"))
    origins = await build.origins(place.settings, place.model, link, AsyncExitStack())
    config = component_configs.verifier_config(place.settings, place.model)
    service = VerifierService(config, origins, metrics=place.observing.metrics)
    await service.start()
    tls = server_tls(place.settings, "verifier")
    return await serve_verifier(place.observing.verifier(service), place.spec.address, TOKEN, tls)


async def _router(place: _Place) -> object:
    from cluster.entry.public import open_entry
    from cluster.verifiers.chosen_verifier import ChosenVerifier
    from services.links.grpc_verifier import GrpcVerifierLink
    from services.router.service import RouterService

    tls = caller_tls(place.settings, "router")
    links = [GrpcVerifierLink(f"127.0.0.1:{port}", TOKEN, tls) for port in place.spec.upstream]
    service = RouterService(
        component_configs.router_config(place.settings, place.model), ChosenVerifier(links), place.observing.metrics
    )
    observed = place.observing.router(service, place.model.name)
    return await open_entry(observed, place.settings, place.observing)


_START: dict[str, Callable[[_Place], Awaitable[object]]] = {
    "retrieval": _retrieval,
    "drafter": _drafter,
    "verifier": _verifier,
    "router": _router,
}


def _print_numbers(observing: Observing) -> None:
    found = {}
    for family in text_string_to_metric_families(observing.exposition().decode()):
        if family.type in ("gauge", "counter"):
            for sample in family.samples:
                labels = ",".join(sample.labels.values())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    print(json.dumps(found), flush=True)


def _collect(_: Observing) -> None:
    gc.collect()


# What its input may say.
ORDERS: Mapping[str, Callable[[Observing], None]] = {"numbers": _print_numbers, "collect": _collect}


async def serve(spec: ComponentSpec, orders: Mapping[str, Callable[[Observing], None]] = ORDERS) -> None:
    """Serve until the input ends.

    Args:
        orders: what it does at each line of its input.
    """
    begin_starting()
    settings = load(Path(spec.config) if spec.config else None, [*spec.flags, f"server.port={spec.port}"])
    name, folder = spec.model
    observing = Observing(settings, on_ray=False)
    # A server stops when nothing refers to it any more.
    serving = await _START[spec.role](_Place(spec, settings, ResolvedModel(name=name, path=Path(folder)), observing))
    print("serving", flush=True)
    async for order in _orders():
        orders[order](observing)
    del serving


async def _orders() -> Any:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


def main(arguments: Sequence[str]) -> None:
    """Serve what the one argument says."""
    asyncio.run(serve(ComponentSpec.read(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
