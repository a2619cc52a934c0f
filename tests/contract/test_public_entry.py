"""The public server under callers that are wrong, many, silent or slow, and while it stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typing_extensions import override

import outrider
from outrider import AsyncClient, Retry
from outrider._retry_info import retry_delay_s
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from services.access.key_records import KeyRecord, hash_key
from services.access.key_ring import KeyRing
from services.api.config import PublicServerConfig
from services.api.grpc import server as public_server
from services.api.grpc.server import LIVENESS, READINESS, SERVICE, PublicServer, serve_public
from services.api.messages import ClientRequest, Completion, TextChunk
from services.api.model_card import ModelCard
from speculation import limits
from speculation.errors import InvalidArgument
from tests.running.patience import PATIENCE_S, held_pauses
from tests.running.refusals import refuses
from tests.servers.router_stub import RouterStub
from tests.unit.api.test_gate import completion

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ONCE = Retry(attempts=1)
KEY = "k" * 24


class FakeRouter(RouterStub):
    """Says ``pieces`` texts of ``size`` characters each, once ``go`` is set."""

    def __init__(self, pieces: int = 2, size: int = 1) -> None:
        self.pieces, self.size = pieces, size
        self.go = asyncio.Event()
        self.go.set()
        self.well = True
        self.hangs = False
        self.running = 0
        self.forgotten: list[str] = []
        self.asked: list[ClientRequest] = []

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        self.asked.append(request)
        if request.input == "refuse":
            raise InvalidArgument("messages", "a conversation", "short\x1b[31m\n" * 20_000)
        self.running += 1
        try:
            await self.go.wait()
            for _ in range(self.pieces):
                yield TextChunk(text="x" * self.size, token_ids=(1,))
            yield completion(3, self.pieces)
        finally:
            self.running -= 1

    @override
    async def models(self, tenant: str | None = None) -> list[ModelCard]:
        await self.go.wait()
        return []

    @override
    async def forget(self, tenant: str) -> None:
        self.forgotten.append(tenant)

    @override
    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        return ()

    @override
    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return ""

    @override
    async def ready(self) -> bool:
        while self.hangs:
            # What hangs may not even end when it is cancelled.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)
        return self.well


@asynccontextmanager
async def serving(router: FakeRouter, **config: Any) -> AsyncIterator[PublicServer]:
    server = await serve_public(router, PublicServerConfig(port=0, **config))
    try:
        yield server
    finally:
        router.hangs = False
        router.go.set()
        await server.stop(0)


async def health(channel: grpc.aio.Channel, service: str = "") -> object:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return reply.status


async def until(channel: grpc.aio.Channel, service: str, wanted: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await health(channel, service) != wanted:
            await asyncio.sleep(0.02)


async def test_messages_that_are_none_are_refused_without_a_traceback_each(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeRouter()) as server, grpc.aio.insecure_channel(server.address) as channel:
        generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")
        models: Any = channel.unary_unary(f"/{SERVICE}/ListModels")
        reflect: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")

        async def reading(call: Any) -> None:
            async for _ in call:
                pass

        with caplog.at_level(logging.INFO):
            for call in (reading(generate(b"\xff\xff")), models(b"\x0a\xff"), reading(reflect(iter([b"\xff\xff"])))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "a message of the type that the method takes" in (caught.value.details() or "")
        assert "Traceback" not in caplog.text


async def test_fields_that_the_server_does_not_know_are_refused_by_number() -> None:
    known = pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(seed=5, logit_bias={7: 1.0}))
    chat = pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")] * 2))
    new = b"\x9a\x06\x01x"
    cases = {
        "#99 is set: must be unset: GenerateRequest has no field 99 here": known.SerializeToString() + new,
        "sampling.#99": pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams.FromString(new)).SerializeToString(),
    }
    chat.messages.messages[1].MergeFromString(new)
    cases["messages.messages[1].#99"] = chat.SerializeToString()
    async with serving(FakeRouter()) as server, grpc.aio.insecure_channel(server.address) as channel:
        generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")
        models: Any = channel.unary_unary(f"/{SERVICE}/ListModels")
        for words, message in cases.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [each async for each in generate(message)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(words)
        with pytest.raises(grpc.aio.AioRpcError, match="ListModelsRequest has no field 99"):
            await models(new)
        assert [each async for each in generate(known.SerializeToString())]


async def test_a_full_server_is_well_and_says_when_to_come_again() -> None:
    router = FakeRouter()
    router.go.clear()
    async with serving(router, max_concurrent_requests=2) as server, grpc.aio.insecure_channel(server.address) as channel:
        clients = [AsyncClient(server.address, retry=ONCE) for _ in range(3)]
        full = [asyncio.create_task(client.generate("x")) for client in clients[:2]]
        while router.running < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(outrider.ResourceExhausted, match="max_concurrent_requests"):
            await clients[2].generate("x")
        await until(channel, "", SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).ListModels(pb.ListModelsRequest())
        assert retry_delay_s(caught.value) == 1.0  # type: ignore[arg-type]
        router.go.set()
        await asyncio.gather(*full)
        assert (await clients[2].generate("x")).usage.completion_tokens == 2
        for client in clients:
            await client.close()


@pytest.mark.exhaustive
async def test_live_and_ready_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DESCRIBE_S", 0.2)
    router = FakeRouter()
    async with serving(router) as server, grpc.aio.insecure_channel(server.address) as channel:
        for service in ("", SERVICE, READINESS):
            await until(channel, service, SERVING)
        router.well = False
        await until(channel, READINESS, NOT_SERVING)
        router.well = True
        await until(channel, READINESS, SERVING)
        router.hangs = True
        for service in ("", SERVICE, READINESS):
            await until(channel, service, NOT_SERVING)
        assert await health(channel, LIVENESS) == SERVING
        router.hangs = False
        await until(channel, "", SERVING)


async def test_a_client_that_reads_nothing_is_given_up() -> None:
    router = FakeRouter(pieces=100_000, size=4096)
    async with serving(router, send_timeout_s=0.3) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="x"))
        await call.initial_metadata()
        async with asyncio.timeout(PATIENCE_S):
            while router.running or not router.asked:
                await asyncio.sleep(0.02)
        call.cancel()
        router.pieces = 1
        async with AsyncClient(server.address) as client:
            assert (await client.generate("x")).usage.completion_tokens == 1


async def test_connections_are_bounded() -> None:
    async with serving(FakeRouter(), max_connections=2) as server:
        host, port = server.address.split(":")
        taken = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for reader, _ in taken:
            await reader.read(1)
        async with AsyncClient(server.address, retry=ONCE) as client:
            with pytest.raises(outrider.Unavailable):
                await client.generate("x", timeout_s=20)
        for _, writer in taken:
            writer.close()
        async with AsyncClient(server.address, retry=Retry(attempts=20, first_delay_s=0.1)) as client:
            assert await client.generate("x")


async def test_a_server_that_stops_is_not_ready_first_and_lets_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    router = FakeRouter()
    router.go.clear()
    server = await serve_public(router, PublicServerConfig(port=0, drain_delay_s=1.0, drain_grace_s=PATIENCE_S))
    async with grpc.aio.insecure_channel(server.address) as channel, AsyncClient(server.address, retry=ONCE) as client:
        await until(channel, "", SERVING)
        early = asyncio.create_task(client.generate("early"))
        while router.running < 1:
            await asyncio.sleep(0.01)
        seen = held_pauses(monkeypatch, public_server)
        stopping = asyncio.create_task(server.stop())
        await until(channel, READINESS, NOT_SERVING)
        assert await health(channel, LIVENESS) == SERVING
        # Balancers need time to see it: until then, calls are answered.
        late = asyncio.create_task(client.generate("late"))
        while router.running < 2:
            await asyncio.sleep(0.01)
        seen.set()
        await asyncio.sleep(0.1)
        router.go.set()
        assert [(await each).usage.completion_tokens for each in (early, late)] == [2, 2]
        await asyncio.wait_for(stopping, PATIENCE_S)
        with pytest.raises(outrider.Unavailable):
            await client.generate("too late")


async def test_errors_stay_short_and_plain() -> None:
    async with serving(FakeRouter()) as server, AsyncClient(server.address, retry=ONCE) as client:
        with pytest.raises(outrider.InvalidArgument) as caught:
            await client.generate("refuse")
        assert len(str(caught.value)) <= 600
        assert str(caught.value).isprintable()
        assert caught.value.field == "messages"


async def test_the_client_sends_what_it_expects_of_the_answer() -> None:
    router = FakeRouter()
    async with serving(router) as server, AsyncClient(server.address, retry=ONCE) as client:
        await client.generate("x", prediction="what it may say")
        await client.generate("x")
    assert [asked.prediction for asked in router.asked] == ["what it may say", ""]


async def test_the_limits_of_keys_over_grpc(tmp_path: Path) -> None:
    keys, audit, router = tmp_path / "keys.yaml", tmp_path / "audit.jsonl", FakeRouter()
    keys.write_text(
        f"- {{hash: {hash_key(KEY + 'a')}, id: a, tenant: both, requests_per_minute: 1, max_tokens: 9, weight: 2}}\n"
        f"- {{hash: {hash_key(KEY + 'b')}, id: b, tenant: both, scopes: [forget]}}\n"
        f"- {{hash: {hash_key(KEY + 'c')}, id: c, expires: 2001-01-01}}\n"
    )
    async with serving(router, keys_file=keys, audit_log=str(audit)) as server:

        def client(name: str) -> AsyncClient:
            return AsyncClient(server.address, api_key=KEY + name, retry=ONCE)

        async with client("a") as one, client("b") as two, client("c") as old, client("d") as nobody:
            assert await one.generate("some secret", request_id="r-1")
            assert (router.asked[0].tenant, router.asked[0].weight, router.asked[0].most_tokens) == ("both", 2.0, 9)
            with pytest.raises(outrider.ResourceExhausted, match="1 requests per minute") as caught:
                await one.generate("x")
            assert 0 < caught.value.retry_after_s <= 60
            with refuses(outrider.InvalidArgument, field="max_tokens", value=10, allowed="at most 9 with this API key"):
                await one.generate("x", max_tokens=10)
            with pytest.raises(outrider.PermissionDenied, match="may not generate"):
                await two.generate("x")
            await two.forget()
            assert router.forgotten == ["both"]
            with pytest.raises(outrider.Unauthenticated, match="has expired"):
                await old.generate("x")
            with pytest.raises(outrider.Unauthenticated, match="no valid API key"):
                await nobody.models()
    told = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["key_id"], line["method"], line["outcome"]) for line in told] == [
        ("a", "Generate", "ok"),
        ("a", "Generate", "ResourceExhausted"),
        ("a", "Generate", "InvalidArgument"),
        ("b", "Generate", "PermissionDenied"),
        ("b", "Forget", "ok"),
        ("c", "authenticate", "expired key"),
        ("", "authenticate", "unknown key"),
    ]
    assert (told[0]["request_id"], told[0]["completion_tokens"]) == ("r-1", 2)
    assert told[0]["address"].startswith("ipv4:127.0.0.1:")
    assert "secret" not in audit.read_text()


async def test_a_key_is_looked_up_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up, find = [], KeyRing.find

    def counted(ring: KeyRing, key: str) -> KeyRecord | None:
        looked_up.append(key)
        return find(ring, key)

    monkeypatch.setattr(KeyRing, "find", counted)
    router = FakeRouter()
    async with (
        serving(router, api_key_hashes=(hash_key(KEY + "a"), hash_key(KEY + "b"))) as server,
        AsyncClient(server.address, api_key=KEY + "a") as one,
        AsyncClient(server.address, api_key=KEY + "b") as two,
    ):
        # Calls under way at once keep their own callers.
        await asyncio.gather(one.generate("x"), two.generate("x"), one.forget(), two.models())
    assert sorted(looked_up) == [KEY + "a"] * 2 + [KEY + "b"] * 2
    assert {asked.tenant for asked in router.asked} == {hash_key(KEY + name)[:16] for name in "ab"}
    assert router.forgotten == [hash_key(KEY + "a")[:16]]
