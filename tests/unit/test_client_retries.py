"""When the client tries again: how long it waits, what it asks the server's word for, and which calls it repeats."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from outrider import AsyncClient, Retry
from outrider._transport import OPTIONS
from outrider.errors import InternalError, ResourceExhausted, Unavailable
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
