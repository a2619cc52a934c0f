"""Several routers on one port: they share connections, one that stops leaves them to the others, strangers stay out."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.links import public_server
from services.links.channel import make_server
from services.links.config import PublicServerConfig, check_server
from services.links.public_server import PublicServer, serve_public
from speculation.errors import ConfigurationError
from tests.patience import held_pauses
from tests.ports import free_port
from tests.service import pipeline


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


async def test_a_port_of_somebody_else_is_refused() -> None:
    shared = PublicServerConfig(port=free_port(), shared=True)
    check_server(shared, first=True)
    with socket.socket() as other:
        other.bind(("127.0.0.1", shared.port))
        other.listen()
        for first in (True, False):
            with pytest.raises(ConfigurationError, match="cannot listen on"):
                check_server(shared, first=first)
    # Another service that shares its port with its own routers: only who comes first can tell.
    server = make_server(1 << 20, shared=True)
    server.add_insecure_port(f"127.0.0.1:{shared.port}")
    await server.start()
    check_server(shared)
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        check_server(shared, first=True)
    await server.stop(None)
    with pytest.raises(ConfigurationError, match=r"server\.port is 0"):
        check_server(PublicServerConfig(port=0, shared=True))
