"""The spans of a request: what they say, and that they reach a collector where there is one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import outrider
from cluster.models.target import ResolvedModel
from cluster.process.local_service import running_in_process
from cluster.settings.config import load
from services.api.messages import ClientRequest, RequestedSampling
from services.links.in_process import InProcessVerifierLink
from services.router.service import RouterService
from services.tracing.request_spans import TracedRouter, TracedVerifier
from speculation.errors import ConfigurationError, OutriderError
from tests.contract.test_seen_from_outside import SECRET, TRACE
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.service import pipeline, tiny_settings


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_is_two_spans(tiny_model: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    async with pipeline(tiny_model) as running:
        from services.router.config import RouterConfig

        verifier = InProcessVerifierLink(TracedVerifier(running.verifier, tracer))
        router = TracedRouter(RouterService(RouterConfig(model_path=str(tiny_model)), verifier), tracer, "tiny")
        sampling = RequestedSampling(max_tokens=20, ignore_eos=True, temperature=0.5, seed=7)
        asked = ClientRequest(input=SECRET, sampling=sampling, strategy="suffix", request_id="mine", traceparent=TRACE)
        end = [event async for event in router.generate(asked)][-1]
        inner, outer = exporter.get_finished_spans()
        exporter.clear()
        # The caller leaves in the middle.
        leaving = router.generate(asked)
        await anext(leaving)
        await leaving.aclose()
        left = exporter.get_finished_spans()
        exporter.clear()
        wrong = ClientRequest(input=SECRET, sampling=sampling, strategy="no such", traceparent="")
        with pytest.raises(OutriderError):
            async for _ in router.generate(wrong):
                pass
        (refused,) = exporter.get_finished_spans()
    assert (outer.name, outer.kind, inner.kind) == ("text_completion tiny", SpanKind.SERVER, SpanKind.INTERNAL)
    assert outer.parent is not None and inner.parent is not None and outer.context is not None
    assert f"{outer.parent.trace_id:032x}-{outer.parent.span_id:016x}" in TRACE
    assert inner.parent.span_id == outer.context.span_id
    said = attributes(outer)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.provider.name"] == "outrider"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.seed"], said["gen_ai.request.max_tokens"]) == (
        0.5,
        7,
        20,
    )
    assert said["gen_ai.usage.output_tokens"] == 20
    assert said["gen_ai.usage.input_tokens"] == len(end.prompt_token_ids)  # type: ignore[union-attr]
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert (said["gen_ai.response.id"], said["outrider.strategy"]) == ("mine", "suffix")
    assert 0 < said["gen_ai.response.time_to_first_chunk"] < 60
    stats = end.stats  # type: ignore[union-attr]
    below = attributes(inner)
    assert below["outrider.passes"] == stats.num_spec_steps
    assert (below["outrider.drafted"], below["outrider.accepted"]) == (
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
    )
    assert {attributes(span)["error.type"] for span in left} == {"cancelled"}
    assert len(left) == 2
    assert attributes(refused)["error.type"] == "InvalidArgument"
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.parent is None
    for span in (inner, outer, *left, refused):
        assert not any(word in span.to_json() for word in SECRET.split())


@pytest.mark.exhaustive
def test_a_server_that_traces_needs_no_collector_to_answer(tiny_model: Path) -> None:
    settings = load(
        flags=tiny_settings(f"tracing.otlp_endpoint=http://127.0.0.1:{free_port()}", "server.ops_port=null"), environ={}
    )
    with (
        running_in_process(settings, ResolvedModel(name="tiny", path=tiny_model)) as addresses,
        outrider.Client(addresses.grpc) as client,
    ):
        assert len(client.generate("fox", max_tokens=5, ignore_eos=True, traceparent=TRACE).token_ids) == 5


class Collector(TraceServiceServicer):
    """Takes spans as a collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.components: set[str] = set()

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        for group in request.resource_spans:
            self.components |= {
                entry.value.string_value for entry in group.resource.attributes if entry.key == "service.name"
            }
            self.spans += [span for scope in group.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


def test_spans_reach_a_collector(tiny_model: Path) -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(max_workers=2))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    settings = load(flags=tiny_settings(f"tracing.otlp_endpoint=http://127.0.0.1:{port}"), environ={})
    model = ResolvedModel(name="tiny", path=tiny_model)
    try:
        with running_in_process(settings, model) as addresses, outrider.Client(addresses.grpc) as client:
            client.generate(SECRET, max_tokens=5, ignore_eos=True, traceparent=TRACE, strategy="suffix")
            # The caller has decided that this one is not traced.
            client.generate(SECRET, max_tokens=5, ignore_eos=True, traceparent=TRACE[:-1] + "0")
        # What was not sent yet is sent when the server stops.
        assert sorted(span.name for span in collector.spans) == ["draft", "text_completion tiny", "verify"]
        assert {span.trace_id.hex() for span in collector.spans} == {TRACE[3:35]}
        ids = {span.name.split()[0]: (span.span_id, span.parent_span_id) for span in collector.spans}
        assert (ids["verify"][1], ids["draft"][1]) == (ids["text_completion"][0], ids["verify"][0])
        assert collector.components == {"outrider-server"}
        assert not any(word in str(collector.spans) for word in SECRET.split())
    finally:
        server.stop(None)


def test_an_endpoint_that_is_none() -> None:
    with refuses(ConfigurationError, field="tracing.otlp_endpoint"):
        load(flags=["tracing.otlp_endpoint=localhost:4317"], environ={})
