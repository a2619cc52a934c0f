"""Calls of which only the headers come, and streams that never end: each has a key, a slot and an end before it costs anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

import outrider
from outrider import AsyncClient
from outrider.v1 import generation_pb2 as pb
from services.access.key_records import hash_key
from services.api.grpc import entrance
from services.api.grpc.health import HealthService
from services.api.grpc.messages import decode_request
from services.api.grpc.server import SERVICE
from speculation.errors import InvalidArgument
from tests.contract.test_public_entry import KEY, ONCE, FakeRouter, serving
from tests.running.patience import PATIENCE_S, at_rest, until
from tests.running.refusals import refuses

GENERATE, MODELS, FORGET = f"/{SERVICE}/Generate", f"/{SERVICE}/ListModels", f"/{SERVICE}/Forget"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def headers_alone(channel: grpc.aio.Channel, method: str, key: str | None = None) -> Any:
    """A call whose message never comes."""
    return channel.stream_stream(method)(nothing(), metadata=(("authorization", f"Bearer {key}"),) if key else ())


async def code(call: Any) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), PATIENCE_S)  # type: ignore[no-any-return]


async def held(call: Any) -> bool:
    """Whether the call goes on for a while."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.code())), 0.3)
        return False
    return True


@pytest.mark.parametrize("method", [GENERATE, MODELS, FORGET, WATCH, REFLECT])
async def test_who_has_no_key_is_refused_by_its_headers(method: str) -> None:
    async with (
        serving(FakeRouter(), api_key_hashes=(hash_key(KEY),)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        assert await code(headers_alone(channel, method)) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", [GENERATE, MODELS, CHECK])
async def test_a_message_that_does_not_come_ends_its_call(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "_ARRIVES_S", 0.2)
    monkeypatch.setattr(entrance, "_CHECK_ARRIVES_S", 0.2)
    async with serving(FakeRouter()) as server, grpc.aio.insecure_channel(server.address) as channel:
        call = headers_alone(channel, method)
        assert await code(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "has not arrived within 0.2 s" in await call.details()


async def test_calls_without_messages_are_counted() -> None:
    async with (
        serving(FakeRouter(), max_concurrent_requests=2) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        calls = [headers_alone(channel, GENERATE) for _ in range(2)]
        assert await held(calls[0])
        assert await code(headers_alone(channel, GENERATE)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        async with AsyncClient(server.address) as client:
            assert await client.generate("x")


@asynccontextmanager
async def from_another_address(port: int) -> AsyncIterator[str]:
    """Where a client's connections come to that port of loopback from 127.0.0.2."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to, back = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        await asyncio.gather(copy(reader, back), copy(to, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_one_address_leaves_slots_to_others() -> None:
    async with (
        serving(FakeRouter(), max_concurrent_requests=16) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        from_another_address(int(server.address.rpartition(":")[2])) as elsewhere,
        AsyncClient(elsewhere, retry=ONCE) as other,
    ):
        calls = [headers_alone(channel, GENERATE) for _ in range(20)]
        asked = [asyncio.create_task(call.code()) for call in calls]
        await until(lambda: sum(each.done() for each in asked) >= 6)
        # Nor are more of them refused later.
        assert await at_rest(lambda: sum(each.done() for each in asked)) == 6
        assert await other.generate("x")
        for call in calls:
            call.cancel()


async def test_checks_without_messages_keep_no_other_address_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "_CHECKS_OF_ONE_ADDRESS", 2)
    async with serving(FakeRouter()) as server, grpc.aio.insecure_channel(server.address) as channel:
        calls = [headers_alone(channel, CHECK) for _ in range(2)]
        assert await held(calls[0])
        assert await code(headers_alone(channel, CHECK)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        check: Any = channel.unary_unary(CHECK)
        async with asyncio.timeout(PATIENCE_S):
            # That the calls have ended is told, and then noticed.
            while await code(check(b"")) is grpc.StatusCode.RESOURCE_EXHAUSTED:
                await asyncio.sleep(0.01)
        assert await check(b"")


@pytest.mark.parametrize("method", [GENERATE, WATCH, REFLECT])
async def test_no_key_has_more_calls_than_it_may(tmp_path: Path, method: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{hash: {hash_key(KEY)}, id: a, max_concurrent: 1}}\n- {{hash: {hash_key(KEY + 'b')}, id: b}}")
    async with serving(FakeRouter(), keys_file=keys) as server, grpc.aio.insecure_channel(server.address) as channel:
        first: Any = channel.stream_stream(method)(one_and_no_end(method), metadata=(("authorization", f"Bearer {KEY}"),))
        assert await held(first)
        assert await code(headers_alone(channel, method, KEY)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with AsyncClient(server.address, api_key=KEY + "b", retry=ONCE) as other:
            assert await other.generate("x")
        first.cancel()


async def one_and_no_end(method: str) -> AsyncIterator[bytes]:
    if method == WATCH:
        yield health_pb2.HealthCheckRequest().SerializeToString()
    await asyncio.Event().wait()


@pytest.mark.parametrize("method", [WATCH, REFLECT])
async def test_streams_that_do_not_end_leave_room_for_answers(method: str) -> None:
    async with (
        serving(FakeRouter(), max_concurrent_requests=8) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        first: Any = channel.stream_stream(method)(one_and_no_end(method))
        assert await held(first)
        assert await code(channel.stream_stream(method)(one_and_no_end(method))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with AsyncClient(server.address, retry=ONCE) as client:
            assert await client.generate("x")
        first.cancel()


async def test_every_call_is_one_of_its_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    names = ("models", "forget")
    keys.write_text("\n".join(f"- {{hash: {hash_key(KEY + name)}, id: {name}, requests_per_minute: 1}}" for name in names))
    async with serving(FakeRouter(), keys_file=keys) as server:
        for name in names:
            async with AsyncClient(server.address, api_key=KEY + name, retry=ONCE) as client:
                await getattr(client, name)()
                with pytest.raises(outrider.ResourceExhausted, match="1 requests per minute"):
                    await getattr(client, name)()


async def test_who_watches_and_takes_nothing_holds_nobody_up() -> None:
    class Silent:
        async def write(self, _: object) -> None:
            await asyncio.Event().wait()

    servicer = HealthService(send_s=60)
    watching = asyncio.create_task(servicer.Watch(health_pb2.HealthCheckRequest(), Silent()))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING), 1)
    watching.cancel()


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage()] * 70_000)), "messages.messages", "70000 entries"),
        (pb.GenerateRequest(sampling=pb.SamplingParams(stop=[""] * 70_000)), "sampling.stop", "70000 entries"),
        (pb.GenerateRequest.FromString(b"\xd8\x3e\x01" * 30_000), "request", "90000 bytes of unknown fields"),
        (pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(stop_token_ids=[1] * 1_100_000)), "stop_token_ids", "1100000 token ids"),
    ],
    ids=["messages", "texts", "unknown", "numbers"],
)  # fmt: skip
def test_millions_of_parts_are_refused_by_their_number(message: pb.GenerateRequest, field: str, value: str) -> None:
    with refuses(InvalidArgument, field=field, value=value):
        decode_request(entrance.only_known(message), tenant=None)
