"""Several routers on one port: they share connections, one that stops leaves them to the others, strangers stay out."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.soak.relay import Relay
from outrider import AsyncClient
from services.api.config import HttpConfig, PublicServerConfig
from services.api.grpc import server as public_server
from services.api.grpc.server import PublicServer, serve_public
from services.api.http.server import serve_http
from services.api.sockets import check_server
from services.links.channel import make_server
from speculation.errors import ConfigurationError
from tests.running.patience import PATIENCE_S, held_pauses, until
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.scripted_router import ScriptedRouter
from tests.servers.service import pipeline


class Counting:
    """A router that counts who asks it for models."""

    def __init__(self, router: object) -> None:
        self._router = router
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        self.asked += name == "models"
        return getattr(self._router, name)


async def ask(address: str) -> None:
    """One call on a connection of its own."""
    from outrider.v1 import generation_pb2, generation_pb2_grpc

    # Without this, channels of one process share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=30)


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        return int(answer.status)


def not_listening(port: int) -> bool:
    """Whether nothing takes connections at this port of loopback any more."""
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) != 0


async def test_connections_are_shared_and_one_that_drains_gets_no_more(tiny_model: Path) -> None:
    config = PublicServerConfig(port=free_port(), shared=True, drain_delay_s=0.0, drain_grace_s=30.0)
    async with pipeline(tiny_model) as running:
        routers = [Counting(running.router), Counting(running.router)]
        servers: list[PublicServer] = [await serve_public(router, config) for router in routers]  # type: ignore[arg-type]
        address = servers[0].address
        assert servers[1].address == address
        # The system draws lots: that forty connections all go to one of two happens once in 2**39 times.
        for _ in range(40):
            await ask(address)
        assert min(router.asked for router in routers) > 0
        await servers[0].stop()
        before = routers[0].asked
        for _ in range(20):
            await ask(address)
        assert routers[0].asked == before
        await servers[1].stop(0)


async def test_over_http_one_that_drains_gets_no_more_while_its_answers_last() -> None:
    config = HttpConfig(port=free_port(), public=PublicServerConfig(shared=True, drain_grace_s=PATIENCE_S))
    routers = [ScriptedRouter("x").with_card(name=name) for name in ("first", "second")]
    routers[0].forever, routers[0].waits = True, 0.001
    servers = [await serve_http(router, config) for router in routers]
    async with AsyncExitStack() as clients:

        async def client(of: str | None = None) -> httpx2.AsyncClient:
            """One whose connection is ``of`` this router's server, as the system draws it."""
            while True:
                drawn = httpx2.AsyncClient(base_url=servers[0].url, timeout=PATIENCE_S)
                await clients.enter_async_context(drawn)
                if of in (None, await served_by(drawn)):
                    return drawn

        held, kept = await client("first"), await client("first")
        body = {"prompt": "x", "stream": True}
        async with held.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines)
            stopping = asyncio.create_task(servers[0].stop())
            # A connection that it has already is told to go, and the next one is another's.
            while (told := await kept.get("/v1/models")).status_code == 200:
                pass
            assert (told.status_code, told.headers["connection"]) == (503, "close")
            assert [await served_by(each) for each in [kept, *[await client() for _ in range(20)]]] == ["second"] * 21
            assert not stopping.done()
            assert await anext(lines) is not None
        await stopping
    await servers[1].stop(0)


async def served_by(client: httpx2.AsyncClient) -> str:
    """The name of the model of the router that answers."""
    answer = await client.get("/v1/models")
    assert answer.status_code == 200
    return str(answer.json()["data"][0]["id"])


async def test_a_server_that_stops_says_so_before_it_refuses(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PublicServerConfig(port=0, drain_delay_s=2.0)
    async with pipeline(tiny_model) as running:
        server = await serve_public(running.router, config)
        while await health(server.address) != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.05)
        seen = held_pauses(monkeypatch, public_server)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        # Balancers see it, while calls that they have sent already are still answered.
        while await health(server.address) != health_pb2.HealthCheckResponse.NOT_SERVING:
            assert not stopping.done()
        await ask(server.address)
        assert not stopping.done()
        seen.set()
        await stopping


async def test_calls_that_meet_a_server_in_the_moment_in_which_it_stops_are_answered_by_another(tiny_model: Path) -> None:
    async with pipeline(tiny_model) as running:
        servers = [await serve_public(running.router, PublicServerConfig(port=0)) for _ in range(2)]
        stopping, other = [int(server.address.rpartition(":")[2]) for server in servers]
        relay = Relay([stopping, other])
        await relay.start()
        async with AsyncClient(await relay.address()) as client:
            first = await client.generate(token_ids=[1, 2, 3], max_tokens=4, seed=5)
            # Calls under way to a server that has stopped taking them: gRPC answers them with CANCELLED.
            relay.stall()
            again = asyncio.create_task(client.generate(token_ids=[1, 2, 3], max_tokens=4, seed=5))
            models = asyncio.create_task(client.models())
            await until(lambda: relay.held)
            ended = asyncio.create_task(servers[0].stop())
            await until(lambda: not_listening(stopping))
            relay.heal()
            assert (await again).token_ids == first.token_ids
            assert len(await models) == 1
        await ended
        await servers[1].stop(0)
        await relay.stop()


async def test_a_port_of_somebody_else_is_refused() -> None:
    shared = PublicServerConfig(port=free_port(), shared=True)
    check_server(shared, first=True)
    with socket.socket() as other:
        other.bind(("127.0.0.1", shared.port))
        other.listen()
        for first in (True, False):
            with refuses(ConfigurationError, says="cannot listen on"):
                check_server(shared, first=first)
    # Another service that shares its port with its own routers: only who comes first can tell.
    server = make_server(1 << 20, shared=True)
    server.add_insecure_port(f"127.0.0.1:{shared.port}")
    await server.start()
    check_server(shared)
    with refuses(ConfigurationError, says="cannot listen on"):
        check_server(shared, first=True)
    await server.stop(None)
    with refuses(ConfigurationError, field="server.port", value=0):
        check_server(PublicServerConfig(port=0, shared=True))
