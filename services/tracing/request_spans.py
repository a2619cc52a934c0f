"""A router and a verifier whose requests become spans: router (SERVER) -> verifier (INTERNAL); drafter_spans has the third.

The trace travels in ``traceparent`` (W3C Trace Context), so that the spans of several processes meet. Names of attributes:
opentelemetry.io, semantic conventions for generative AI; what is ours begins with ``outrider.``. No span holds text, tokens,
keys or tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue
from typing_extensions import override

from services.api.messages import ClientRequest, Completion, RouterPort, TextChunk, is_conversation
from services.api.passing_router import PassingRouter
from services.tracing.trace_context import set_attributes, span_above, traceparent_of_span
from speculation.adapters import AdapterOrder
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, VerifierCard
from speculation.ports import VerifierPort
from speculation.reloads import ReloadOrder
from speculation.types import Plan, SpeculationStats

_PROVIDER = "outrider"
# Sampling parameters and the names that the conventions give them.
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


class TracedRouter(PassingRouter):
    """Implements ``services.api.messages.RouterPort`` in front of another router.

    Args:
        model: the name of the served model.
    """

    def __init__(self, router: RouterPort, tracer: Tracer, model: str) -> None:
        super().__init__(router)
        self._tracer = tracer
        self._model = model

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        operation = "chat" if is_conversation(request) else "text_completion"
        name = f"{operation} {self._model}"
        with _span(self._tracer, name, SpanKind.SERVER, request.traceparent) as span:
            set_attributes(span, {"gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER, **_asked(request)})
            span.set_attribute("gen_ai.request.model", request.model or self._model)
            events = self._router.generate(replace(request, traceparent=traceparent_of_span(span) or request.traceparent))
            try:
                async for event in events:
                    if isinstance(event, Completion):
                        set_attributes(span, _answered(event))
                    yield event
            finally:
                await events.aclose()


class TracedVerifier:
    """Implements ``speculation.ports.VerifierPort`` in front of another verifier."""

    def __init__(self, verifier: VerifierPort, tracer: Tracer) -> None:
        self._verifier = verifier
        self._tracer = tracer

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        stats, queued_s = SpeculationStats(), 0.0
        with _span(self._tracer, "verify", SpanKind.INTERNAL, request.traceparent) as span:
            events = self._verifier.generate(replace(request, traceparent=traceparent_of_span(span) or request.traceparent))
            try:
                async for event in events:
                    if isinstance(event, Progress):
                        if event.restarted:
                            stats = SpeculationStats()
                        sources, taken = event.accepted_sources, len(event.token_ids)
                        stats.record(drafted=event.num_drafted, accepted_sources=sources, committed=taken)
                        queued_s = event.queue_s
                    yield event
            finally:
                set_attributes(span, _verified(request, stats, queued_s))
                await events.aclose()

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        return await self._verifier.compare(request, plans)

    async def describe(self) -> VerifierCard:
        return await self._verifier.describe()

    async def forget(self, tenant: str) -> None:
        await self._verifier.forget(tenant)

    async def adapt(self, order: AdapterOrder) -> str:
        return await self._verifier.adapt(order)

    async def reload(self, order: ReloadOrder) -> str:
        return await self._verifier.reload(order)


@contextmanager
def _span(tracer: Tracer, name: str, kind: SpanKind, traceparent: str) -> Iterator[Span]:
    """A span during the block, below the caller's; what the block raises becomes its ``error.type``."""
    above = span_above(traceparent)
    # Not made the current span: the block belongs to a generator, whose steps run in its readers' contexts.
    span = tracer.start_span(name, above, kind)
    try:
        yield span
    except BaseException as error:
        # The error's text may quote the request.
        left = isinstance(error, (GeneratorExit, asyncio.CancelledError))
        span.set_attribute("error.type", "cancelled" if left else type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        span.end()


def _asked(request: ClientRequest) -> dict[str, AttributeValue]:
    given = request.sampling.given
    attributes: dict[str, AttributeValue] = {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}
    if (seed := given.get("seed", 0)) >= 2**63:
        # Attributes are signed numbers of 64 bits: the one with the same bits, which is also how HTTP's -1 was sent.
        attributes[_SAMPLING["seed"]] = seed - 2**64
    if request.strategy is not None:
        attributes["outrider.requested_strategy"] = request.strategy[:64]
    how = request.how
    return {**attributes, "gen_ai.request.stream": how.streams, "gen_ai.request.choice.count": how.choices}


def _answered(event: Completion) -> dict[str, AttributeValue]:
    return {
        "gen_ai.response.id": event.request_id,
        "gen_ai.response.model": event.model,
        "gen_ai.response.finish_reasons": (event.finish_reason.value,),
        "gen_ai.response.time_to_first_chunk": event.timing.time_to_first_token_s,
        "gen_ai.usage.input_tokens": len(event.prompt_token_ids),
        "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
        "gen_ai.usage.output_tokens": event.completion_tokens,
        "outrider.strategy": event.strategy,
        "outrider.queue_s": event.timing.queue_s,
    }


def _verified(request: GenerationRequest, stats: SpeculationStats, queued_s: float) -> dict[str, AttributeValue]:
    return {
        "outrider.request_id": request.request_id,
        "outrider.strategy": request.plan.strategy,
        "outrider.passes": stats.num_spec_steps,
        "outrider.drafted": stats.num_draft_tokens,
        "outrider.accepted": stats.num_accepted_draft_tokens,
        "outrider.queue_s": queued_s,
        "outrider.resumed_after": len(request.committed),
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": stats.num_committed_tokens,
    }
