"""A router that takes over another one's ports, which no other service may have, and what balancers are told meanwhile."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from cluster.entry import ops
from cluster.entry.public import PublicEntry, open_entry
from cluster.process.observing import Observing
from cluster.settings.config import Settings, load
from services.links.channel import make_server
from speculation.errors import ConfigurationError
from tests.running.patience import PATIENCE_S
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.scripted_router import ScriptedRouter
from tests.servers.service import tiny_settings

OURS = "ray:1/outrider"


def settings_with(*flags: str) -> Settings:
    ports = [f"server.{name}={free_port()}" for name in ("port", "http_port", "ops_port")]
    return load(flags=[*tiny_settings(), *ports, *flags], environ={})


async def opened(settings: Settings, router: ScriptedRouter | None = None, service: str = OURS) -> PublicEntry:
    return await open_entry(router or ScriptedRouter("x"), settings, Observing(settings, on_ray=False), service=service)


async def stopped(*entries: PublicEntry) -> None:
    await asyncio.gather(*(entry.stop() for entry in entries))


@asynccontextmanager
async def streaming(entry: PublicEntry, router: ScriptedRouter) -> AsyncIterator[None]:
    """An answer under way during the block, which ends at its end."""
    router.forever, router.waits = True, 0.001
    body = {"prompt": "x", "stream": True}
    async with (
        httpx2.AsyncClient(base_url=str(entry.addresses.http), timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines)
        yield
        router.forever = False
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def status(settings: Settings, path: str) -> int:
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
        return (await client.get(f"http://127.0.0.1:{settings.server.ops_port}{path}")).status_code


@pytest.mark.exhaustive
async def test_a_router_is_replaced_while_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_TRY_AGAIN_S", 0.01)
    settings, router = settings_with("server.drain_grace_s=60"), ScriptedRouter("x")
    first = await opened(settings, router)
    async with streaming(first, router):
        assert await status(settings, "/ready") == 200
        stopping = asyncio.create_task(first.stop())
        second = await opened(settings)
        assert second.addresses == first.addresses
        # Told at once on the port that operators ask, although the router would still answer.
        assert await status(settings, "/ready") == 503 and router.is_ready
        assert await status(settings, "/health") == 200
        async with httpx2.AsyncClient(base_url=str(second.addresses.http), timeout=PATIENCE_S) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert not stopping.done()
    await stopping
    # The port of those who operate the service is the next router's as soon as it is free.
    async with asyncio.timeout(PATIENCE_S):
        while second._ops.listener is None:
            await asyncio.sleep(0.01)
    assert await status(settings, "/ready") == 200
    await stopped(second)


@pytest.mark.exhaustive
async def test_two_services_on_one_port_are_refused() -> None:
    settings = settings_with()
    ours = [await opened(settings), await opened(settings)]
    with refuses(ConfigurationError, says="the routers of another service share this port; choose another one"):
        await opened(settings, service="ray:2/outrider")
    with refuses(ConfigurationError, says="cannot listen on"):
        await opened(settings, service="")
    await stopped(*ours)
    other = await opened(settings, service="ray:2/outrider")
    await stopped(other)


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ["port", "http_port"])
async def test_programs_that_would_share_the_port_are_noticed(name: str) -> None:
    settings = settings_with()
    # gRPC's servers share their port unless they are told not to.
    stranger = make_server(1 << 20, shared=True)
    stranger.add_insecure_port(f"127.0.0.1:{getattr(settings.server, name)}")
    await stranger.start()
    with refuses(ConfigurationError, f"127.0.0.1:{getattr(settings.server, name)}", says=f"server.{name}"):
        await opened(settings)
    await stranger.stop(None)
    await stopped(await opened(settings))


@pytest.mark.exhaustive
async def test_many_come_at_once() -> None:
    settings = settings_with()
    entries = await asyncio.gather(*(opened(settings) for _ in range(6)))
    await stopped(*entries)


async def test_an_ops_host_of_another_machine_is_no_matter_of_patience() -> None:
    with refuses(ConfigurationError, says="server.ops_host must be the address"):
        await opened(settings_with("server.ops_host=192.0.2.1"))


@pytest.mark.exhaustive
async def test_nothing_is_kept_from_garbage_collection_after_its_end() -> None:
    """What is frozen when Python ends is never freed: bindings then print a page about leaks behind every answer."""
    entry = await opened(settings_with())
    assert gc.get_freeze_count() > 0
    await stopped(entry)
    assert gc.get_freeze_count() == 0
