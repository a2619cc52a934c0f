"""A cell of the chaos matrix in one process: two verifiers with different weights by mistake, and the one that decodes dies.

An answer goes on by the weights that began it, or ends in one error that names both; it is never half of one and half of the
other. What it was chosen by stands in its final message, and in a metric.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

import outrider
from cluster import build
from cluster.settings import component_configs
from cluster.settings.config import load
from cluster.verifiers.chosen_verifier import ChosenVerifier
from services.api.config import PublicServerConfig
from services.api.grpc.server import serve_public
from services.drafter.service import DrafterService
from services.links.grpc_verifier import GrpcVerifierLink, serve_verifier
from services.links.in_process import InProcessDraftLink
from services.metrics.prometheus_sink import PrometheusSink
from services.router.service import RouterService
from services.verifier.service import VerifierService
from tests.chaos.cells import ASKED, options, plain_answers
from tests.chaos.history import DONE, FAILED, TOKENS, History, violations
from tests.chaos.in_processes import tiny
from tests.engine.stage_threads import launch_thread
from tests.running.patience import until
from tests.servers.service import tiny_settings
from tests.tiny_models.tiny import make_tiny_model

TOKEN = "a shared secret of ours"
# Tokens of a stream that have come when the verifier dies.
AFTER = 60


@dataclass
class Served:
    """A verifier behind a server of its own, which can go and come back."""

    verifier: VerifierService
    sink: PrometheusSink
    arithmetic: str
    server: grpc.aio.Server
    port: int

    async def die(self) -> None:
        await self.server.stop(0)

    async def return_(self) -> None:
        self.server, _ = await serve_verifier(self.verifier, f"127.0.0.1:{self.port}", TOKEN)


@dataclass
class Both:
    """What users of both saw."""

    history: History = field(default_factory=History)
    arithmetic: dict[str, str] = field(default_factory=dict)
    shown: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in ASKED})
    errors: dict[str, outrider.OutriderError] = field(default_factory=dict)

    async def watch(self, address: str, name: str) -> None:
        async with outrider.AsyncClient(address, retry=outrider.Retry(attempts=1)) as client:
            try:
                async with client.stream(**options(name)) as stream:
                    async for chunk in stream:
                        self.history.add(TOKENS, name, chunk.token_ids)
                        self.shown[name] += chunk.token_ids
                assert stream.result is not None
                self.arithmetic[name] = stream.result.arithmetic
                self.history.add(DONE, name)
            except outrider.OutriderError as error:
                self.errors[name] = error
                self.history.add(FAILED, name, text=str(error))


@asynccontextmanager
async def verifier(model: Path, *flags: str) -> AsyncIterator[Served]:
    settings = load(flags=tiny_settings(*flags), environ={})
    drafter, sink = DrafterService(component_configs.drafter_config(settings, tiny(model))), PrometheusSink()
    await drafter.start()
    origins = await build.origins(settings, tiny(model), InProcessDraftLink(drafter), AsyncExitStack())
    service = VerifierService(component_configs.verifier_config(settings, tiny(model)), origins, launch_thread, metrics=sink)
    await service.start()
    server, port = await serve_verifier(service, "127.0.0.1:0", TOKEN)
    served = Served(service, sink, (await service.describe()).arithmetic, server, port)
    yield served
    await served.server.stop(0)
    await service.stop()
    await drafter.stop()


@asynccontextmanager
async def two_verifiers(
    models: tuple[Path, Path], *flags: str, own: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> AsyncIterator[tuple[str, tuple[Served, Served]]]:
    """Both behind one router; gives its address.

    Args:
        own: settings of each verifier.
    """
    settings = load(flags=tiny_settings(*flags), environ={})
    async with verifier(models[0], *own[0]) as one, verifier(models[1], *own[1]) as other:
        links = [GrpcVerifierLink(f"127.0.0.1:{each.port}", TOKEN) for each in (one, other)]
        router = RouterService(component_configs.router_config(settings, tiny(models[0])), ChosenVerifier(links))
        server = await serve_public(router, PublicServerConfig(port=0))
        try:
            yield server.address, (one, other)
        finally:
            await server.stop(0)
            for link in links:
                await link.close()


Expected = dict[str, Mapping[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_model, make_tiny_model(tmp_path_factory.mktemp("other"), initializer_range=0.41)


async def right(models: tuple[Path, Path], both: tuple[Served, Served]) -> Expected:
    """What plain decoding says, by arithmetic."""
    return {served.arithmetic: await plain_answers(model) for model, served in zip(models, both, strict=True)}


async def broken_off(address: str, both: tuple[Served, Served], seen: Both) -> tuple[list[asyncio.Task[None]], Served]:
    """Users who stream, and the verifier that has just died under those whose answers it had begun."""
    users = [asyncio.create_task(seen.watch(address, name)) for name in ASKED]
    await until(lambda: all(len(seen.shown[name]) >= AFTER for name in ASKED))
    victim = max(both, key=lambda served: served.verifier.loop.running)
    assert victim.verifier.loop.running
    await victim.die()
    return users, victim


@pytest.mark.exhaustive
async def test_an_answer_waits_for_the_weights_that_began_it(models: tuple[Path, Path]) -> None:
    seen = Both()
    async with two_verifiers(models) as (address, both):
        expected = await right(models, both)
        users, victim = await broken_off(address, both, seen)
        await asyncio.sleep(1.5)
        assert any(not user.done() for user in users), (users, seen.errors)
        await victim.return_()
        await asyncio.gather(*users)
        assert not seen.errors
        assert victim.arithmetic in seen.arithmetic.values()
        own = {name: expected[seen.arithmetic[name]][name] for name in ASKED}
        assert violations(seen.history.events, own) == []
        assert any(expected[both[0].arithmetic][name] != expected[both[1].arithmetic][name] for name in ASKED)
        for served in both:
            assert f'outrider_arithmetic_info{{arithmetic="{served.arithmetic}"}} 1.0' in served.sink.exposition().decode()


@pytest.mark.exhaustive
async def test_or_ends_in_one_error_that_names_both(models: tuple[Path, Path]) -> None:
    seen = Both()
    async with two_verifiers(models, "router.migration_timeout_s=2") as (address, both):
        expected = await right(models, both)
        users, victim = await broken_off(address, both, seen)
        await asyncio.gather(*users)
        (other,) = (served for served in both if served is not victim)
        assert seen.errors and other.verifier.alive
        for name, error in seen.errors.items():
            assert isinstance(error, outrider.Unavailable)
            assert victim.arithmetic in str(error) and other.arithmetic in str(error), error
            seen.arithmetic[name] = victim.arithmetic
        own = {name: expected[seen.arithmetic[name]][name] for name in ASKED}
        assert violations(seen.history.events, own) == []
