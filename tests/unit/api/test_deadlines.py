"""A verifier that never answers hangs nobody who asks what it serves, whether it is well, or to forget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.api.config import PublicServerConfig
from services.api.grpc import server as server_module
from services.api.grpc.server import serve_public
from services.api.messages import ClientRequest, RequestedSampling
from services.links.in_process import InProcessVerifierLink
from services.router.config import RouterConfig
from services.router.service import RouterService
from speculation import limits
from speculation.adapters import AdapterOrder
from speculation.errors import Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard
from tests.running.patience import PATIENCE_S, until
from tests.servers.verifier_links import in_process, over_grpc


class Hung:
    """Implements ``VerifierPort``, and answers nothing."""

    def __init__(self) -> None:
        self.asked = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        await asyncio.Event().wait()
        yield Progress(token_ids=())

    async def describe(self) -> VerifierCard:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def adapt(self, order: AdapterOrder) -> str:
        raise NotImplementedError

    async def forget(self, tenant: str) -> None:
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DESCRIBE_S", 0.1)
    monkeypatch.setattr(limits, "FORGET_S", 0.1)


@pytest.mark.parametrize("connect", [in_process, over_grpc], ids=["in_process", "grpc"])
async def test_a_router_says_that_its_verifier_does_not_answer(connect: object, tiny_model: Path) -> None:
    verifier = Hung()
    async with connect(verifier) as link, asyncio.timeout(PATIENCE_S):  # type: ignore[operator]
        router = RouterService(RouterConfig(model_path=str(tiny_model)), link)
        assert not await router.ready()
        with pytest.raises(Unavailable, match=r"the verifier has not answered for 0\.1 s"):
            await router.models()
        with pytest.raises(Unavailable, match="has not answered"):
            await anext(router.generate(ClientRequest(input="x", sampling=RequestedSampling())))
        # Over a wire, a busy machine may give up before the call has arrived.
        assert verifier.asked == 3 if connect is in_process else verifier.asked <= 3


async def test_a_link_does_not_wait_for_ever_either() -> None:
    async with over_grpc(Hung()) as link, asyncio.timeout(PATIENCE_S):
        for asking in (link.describe(), link.forget("one")):
            with pytest.raises(Unavailable, match=r"the verifier has not answered for 0\.1 s"):
                await asking


async def test_health_goes_on_being_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PERIOD_S", 0.05)
    verifier = Hung()
    router = RouterService(RouterConfig(model_path=str(tiny_model)), InProcessVerifierLink(verifier))
    server = await serve_public(router, PublicServerConfig(port=0))
    async with grpc.aio.insecure_channel(server.address) as channel, asyncio.timeout(PATIENCE_S):
        stub = health_pb2_grpc.HealthStub(channel)
        status = None
        while status != health_pb2.HealthCheckResponse.NOT_SERVING:
            status = (await stub.Check(health_pb2.HealthCheckRequest())).status
            await asyncio.sleep(0.02)
        await until(lambda: verifier.asked >= 2)
    await server.stop(0)
