"""What a router counts: requests, whatever becomes of them, and whom the gate refuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
import yaml
from typing_extensions import override

from services.access.gate import open_gate
from services.access.key_records import hash_key
from services.api.messages import ClientRequest, Completion, RequestedSampling, TextChunk, Timing
from services.api.model_card import ModelCard
from services.metrics.observed_router import ObservedRouter
from services.metrics.prometheus_sink import PrometheusSink
from speculation.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from speculation.types import FinishReason, SpeculationStats
from tests.servers.router_stub import RouterStub
from tests.unit.metrics.test_metrics import of, told


class Answering(RouterStub):
    """A router that answers with ``events``, then raises ``error`` if there is one."""

    def __init__(self, *events: TextChunk | Completion, error: BaseException | None = None) -> None:
        self.events = events
        self.error = error
        self.closed = 0

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        try:
            for event in self.events:
                yield event
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1

    @override
    async def models(self, tenant: str | None = None) -> list[ModelCard]:
        return []

    @override
    async def forget(self, tenant: str) -> None:
        pass

    @override
    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        return ()

    @override
    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return ""

    @override
    async def ready(self) -> bool:
        return self.error is None


ASKED = ClientRequest(input="secret words", sampling=RequestedSampling(max_tokens=7), tenant="somebody", request_id="mine")
PIECE = TextChunk(text="ab", token_ids=(1, 2))
END = Completion(
    request_id="mine",
    finish_reason=FinishReason.LENGTH,
    stop=None,
    prompt_token_ids=(1,) * 5,
    cached_tokens=0,
    completion_tokens=7,
    seed=0,
    model="tiny",
    strategy="blend",
    stats=SpeculationStats(),
    timing=Timing(queue_s=0.5, time_to_first_token_s=0.75, total_s=2.25),
)


async def test_requests_are_counted_once_whatever_becomes_of_them() -> None:
    sink = PrometheusSink()
    for router, most in (
        (Answering(PIECE, PIECE, END), None),
        (Answering(PIECE, PIECE, END), 3),
        (Answering(PIECE, PIECE), 1),
        (Answering(error=InvalidArgument("stop", "x", "y")), None),
        (Answering(PIECE, error=Unavailable("gone")), None),
        (Answering(error=DeadlineExceeded("late")), None),
        (Answering(error=asyncio.CancelledError()), None),
        (Answering(error=RuntimeError("planted")), None),
    ):
        answer = ObservedRouter(router, sink).generate(ASKED)
        try:
            taken = 0
            async for _ in answer:
                taken += 1
                # As gRPC does when its caller leaves, or has had the end.
                if taken == most:
                    break
        except (OutriderError, RuntimeError, asyncio.CancelledError):
            pass
        await answer.aclose()
        assert router.closed == 1
    counted = {labels: value for (name, labels), value in told(sink).items() if name == "requests_total"}
    assert counted == {
        (("code", "OK"), ("outcome", "length")): 2,
        (("code", "CANCELLED"), ("outcome", "cancelled")): 2,
        (("code", "DEADLINE_EXCEEDED"), ("outcome", "cancelled")): 1,
        (("code", "INVALID_ARGUMENT"), ("outcome", "refused")): 1,
        (("code", "UNAVAILABLE"), ("outcome", "error")): 1,
        (("code", "INTERNAL"), ("outcome", "error")): 1,
    }
    assert of(sink, "num_requests_open") == 0
    assert of(sink, "generation_tokens_total") == 2 * (2 + 2 + 1 + 1)
    assert of(sink, "inter_token_latency_seconds_count") == 2
    assert of(sink, "prompt_tokens_total") == of(sink, "request_prompt_tokens_sum") == 10
    for name, seconds in (
        ("time_to_first_token_seconds", 0.75),
        ("e2e_request_latency_seconds", 2.25),
        ("request_queue_time_seconds", 0.5),
        ("request_prefill_time_seconds", 0.25),
        ("request_decode_time_seconds", 1.5),
        ("request_inference_time_seconds", 1.75),
        ("request_time_per_output_token_seconds", 0.25),
    ):
        assert of(sink, f"{name}_sum") == pytest.approx(2 * seconds), name
    assert of(sink, "request_params_max_tokens_sum") == 14
    for private in ("secret", "somebody", "mine"):
        assert private.encode() not in sink.exposition()


async def test_readiness_is_told() -> None:
    sink = PrometheusSink()
    for error, ready in ((None, 1), (Internal("x"), 0)):
        assert await ObservedRouter(Answering(error=error), sink).ready() is bool(ready)
        assert of(sink, "ready") == ready


def test_the_gate_counts_whom_it_refuses() -> None:
    sink = PrometheusSink()
    gate = open_gate([hash_key("k" * 20)], metrics=sink)
    for key in (None, "wrong" * 5, "wrong" * 5):
        with pytest.raises(Unauthenticated):
            gate.caller(key)
    assert gate.caller("k" * 20).tenant
    assert of(sink, "auth_failures_total", reason="no_key") == 1
    assert of(sink, "auth_failures_total", reason="unknown_key") == 2


async def test_the_gate_counts_limits_that_are_reached(tmp_path: Path) -> None:
    sink, file = PrometheusSink(), tmp_path / "keys.yaml"
    record = {"hash": hash_key("k" * 20), "id": "a", "max_concurrent": 1, "requests_per_minute": 2}
    file.write_text(yaml.safe_dump([record]))
    gate = open_gate(keys_file=file, metrics=sink)
    caller = gate.caller("k" * 20)
    async with gate.admit(caller, ASKED):
        with pytest.raises(ResourceExhausted):
            async with gate.admit(caller, ASKED):
                pass
    for _ in range(2):
        with contextlib.suppress(ResourceExhausted):
            async with gate.admit(caller, ASKED):
                pass
    assert of(sink, "rate_limited_total", limit="max_concurrent") == 1
    assert of(sink, "rate_limited_total", limit="requests_per_minute") == 1
