"""When the client tries again: how long it waits, what it asks the server's word for, and which calls it repeats."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from typing_extensions import override

from outrider import AsyncClient, Client, Retry
from outrider._transport import OPTIONS
from outrider.errors import Cancelled, InternalError, ResourceExhausted, Unavailable
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc


def test_delays_double_are_drawn_at_random_and_heed_the_server() -> None:
    retry = Retry(attempts=3, first_delay_s=1.0)
    delays = [[retry.delay_before(attempt, Unavailable("x")) for _ in range(50)] for attempt in (2, 3)]
    assert all(0.5 <= (delay or 0) <= 1.5 for delay in delays[0])
    assert all(1.0 <= (delay or 0) <= 3.0 for delay in delays[1])
    assert len(set(delays[0])) > 10
    assert retry.delay_before(4, Unavailable("x")) is None
    assert retry.delay_before(2, InternalError("x")) is None
    assert retry.delay_before(2, ResourceExhausted("x", 20.0)) == 20.0
    # Who waits for an hour does not wait in a call.
    assert retry.delay_before(2, ResourceExhausted("x", 3600.0)) is None
    stopping = Unavailable("x")
    stopping.retry_after_s = 7.0
    assert retry.delay_before(2, stopping) == 7.0


def test_calls_go_to_all_addresses_in_turn() -> None:
    assert ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}') in OPTIONS


class Starting(generation_pb2_grpc.GenerationServiceServicer):
    """Is not there for the first two calls."""

    def __init__(self) -> None:
        self.calls = 0

    @override
    async def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.calls < 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return pb.ListModelsResponse()


@pytest.mark.parametrize("attempts", [2, 3])
async def test_calls_without_a_stream_are_repeated_as_well(attempts: int) -> None:
    server, servicer = grpc.aio.server(), Starting()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", retry=Retry(attempts=attempts, first_delay_s=0.01)) as client:
        if attempts == 3:
            assert await client.models() == []
        else:
            with pytest.raises(Unavailable):
                await client.models()
    assert servicer.calls == attempts
    await server.stop(None)


class Stopping(generation_pb2_grpc.GenerationServiceServicer):
    """Drops its first call as gRPC drops those that meet a server which stops.

    Args:
        said: pieces that the first call gets before.
    """

    def __init__(self, said: int) -> None:
        self.said, self.calls = said, 0
        self.begun = asyncio.Event()

    @override
    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.calls == 1:
            for _ in range(self.said):
                yield pb.GenerateResponse(chunk=pb.Chunk(text="a", token_ids=[1]))
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        self.begun.set()
        if self.said:
            await asyncio.Event().wait()
        yield pb.GenerateResponse(chunk=pb.Chunk(text="b", token_ids=[2]))
        yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_LENGTH))


async def _stopping(said: int) -> tuple[grpc.aio.Server, Stopping, str]:
    server, servicer = grpc.aio.server(), Stopping(said)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, servicer, f"127.0.0.1:{port}"


async def test_a_call_that_a_stopping_server_drops_is_repeated() -> None:
    for blocking in (True, False):
        server, servicer, address = await _stopping(0)
        retry = Retry(first_delay_s=0.01)
        if blocking:
            with Client(address, retry=retry) as client:
                answer = await asyncio.to_thread(client.generate, "x")
        else:
            async with AsyncClient(address, retry=retry) as awaited:
                answer = await awaited.generate("x")
        assert (answer.token_ids, servicer.calls) == ((2,), 2)
        await server.stop(None)


async def test_a_half_told_answer_is_unavailable_and_what_the_caller_closes_is_cancelled() -> None:
    server, servicer, address = await _stopping(1)
    with Client(address) as client:
        with pytest.raises(Unavailable, match="dropped the call"):
            await asyncio.to_thread(client.generate, "x")
        assert servicer.calls == 1
        told = asyncio.create_task(asyncio.to_thread(client.generate, "x"))
        await servicer.begun.wait()
        client.close()
        with pytest.raises(Cancelled):
            await told
    await server.stop(None)
