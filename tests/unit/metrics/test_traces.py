"""What spans say of how a request was asked, and one span for each of a drafter's sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import httpx2
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from services.api.config import HttpConfig
from services.api.http.server import serve_http
from services.tracing import drafter_spans
from services.tracing.drafter_spans import TracedDrafter
from services.tracing.request_spans import TracedRouter
from speculation.columns import DraftColumns, ReportColumns
from speculation.messages import CloseSession, Draft, DraftFailure, FeatureChunk, ForgetTenant, OpenSession, StepReport
from speculation.ports import Drafter
from tests.servers.scripted_router import ScriptedRouter

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FOX = [{"role": "user", "content": "fox"}]


class Spans:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def tracer(self) -> Tracer:
        return self._provider.get_tracer("test")

    def taken(self) -> list[Any]:
        found = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        # As a collector gets them.
        encode_spans(found)
        return found


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.mark.parametrize(
    ("path", "body", "operation", "streams", "choices"),
    [
        ("chat/completions", {"messages": FOX}, "chat", False, 1),
        ("chat/completions", {"messages": FOX, "n": 2, "stream": True}, "chat", True, 2),
        ("completions", {"prompt": "fox"}, "text_completion", False, 1),
    ],
)
async def test_requests_over_http(
    spans: Spans, path: str, body: dict[str, Any], operation: str, streams: bool, choices: int
) -> None:
    server = await serve_http(TracedRouter(ScriptedRouter("x"), spans.tracer, "tiny"), HttpConfig(port=0))
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
    await server.stop(0)
    found = spans.taken()
    assert [span.name for span in found] == [f"{operation} tiny"] * choices
    for span in found:
        assert span.attributes["gen_ai.operation.name"] == operation
        assert span.attributes["gen_ai.request.stream"] is streams
        assert span.attributes["gen_ai.request.choice.count"] == choices


async def test_seeds_of_64_bits_can_be_sent(spans: Spans, caplog: pytest.LogCaptureFixture) -> None:
    server = await serve_http(TracedRouter(ScriptedRouter("x"), spans.tracer, "tiny"), HttpConfig(port=0))
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        for seed in (-1, 2**63, 7):
            assert (await client.post("/v1/completions", json={"prompt": "fox", "seed": seed})).status_code == 200
    await server.stop(0)
    assert [span.attributes["gen_ai.request.seed"] for span in spans.taken()] == [-1, -(2**63), 7]
    assert not caplog.records


class Together:
    """A drafter of which only its drafts for several sessions are asked."""

    def together(self, reports: object) -> DraftColumns:
        return DraftColumns(
            left=(),
            session_ids=("a", "b", "nobody"),
            base_lengths=(1, 1, 1),
            base_hashes=(0, 0, 0),
            node_counts=(3, 0, 2),
            tokens=(1,) * 5,
            parents=(-1,) * 5,
            sources=(0,) * 5,
            source_names=("suffix",),
            scores=(),
            drafting_s=0.0,
            group="",
        )

    async def open(self, message: OpenSession) -> None:
        """Drafts nothing yet."""

    def close(self, message: CloseSession) -> None:
        """Closes nothing."""


async def test_drafts_for_several_sessions_count_for_each(spans: Spans) -> None:
    drafter = TracedDrafter(cast(Drafter, Together()), spans.tracer)
    for name in ("a", "b"):
        await drafter.open(opening(name))
    assert drafter.together(cast(ReportColumns, None)) is not None
    for name in ("a", "b"):
        drafter.close(CloseSession(session_id=name))
    counted = ("steps", "drafts", "drafted", "failures")
    assert [[span.attributes[f"outrider.{each}"] for each in counted] for span in spans.taken()] == [
        [1, 1, 3, 0],
        [1, 0, 0, 0],
    ]


class Fails:
    """A drafter that fails at every step."""

    def __init__(self) -> None:
        self.traces: list[str] = []

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        self.traces.append(message.traceparent)
        return None

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        return DraftFailure(session_id=message.session_id, reason="planted")

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        return
        yield

    def features(self, message: FeatureChunk) -> None:
        pass

    def close(self, message: CloseSession) -> None:
        pass

    async def forget(self, message: ForgetTenant) -> None:
        pass


def opening(name: str, traceparent: str = TRACE) -> OpenSession:
    return OpenSession(
        session_id=name, tokens=(1,), prompt_length=1, sources=("suffix",), max_nodes=4, traceparent=traceparent
    )


def step(name: str) -> StepReport:
    return StepReport(session_id=name, committed=(1,), length=2, prefix_hash=0, accepted_path=(), max_nodes=4)


async def test_a_session_is_a_span_until_it_is_closed(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_spans, "_MOST_OPEN", 2)
    inner = Fails()
    drafter = TracedDrafter(inner, spans.tracer)
    await drafter.open(opening("a"))
    await drafter.step(step("a"))
    assert not spans.taken()
    drafter.close(CloseSession(session_id="a"))
    (span,) = spans.taken()
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" in TRACE
    assert inner.traces[0].split("-")[2] == f"{span.context.span_id:016x}"
    assert dict(span.attributes) == {
        "outrider.request_id": "a",
        "outrider.sources": ("suffix",),
        "outrider.steps": 1,
        "outrider.drafts": 0,
        "outrider.drafted": 0,
        "outrider.failures": 1,
    }
    # Nobody traces this one.
    await drafter.open(opening("b", ""))
    drafter.close(CloseSession(session_id="b"))
    assert not spans.taken() and inner.traces[1] == ""
    # Opened anew, and never closed.
    for name in ("c", "c", "d", "e"):
        await drafter.open(opening(name))
    assert [span.attributes["outrider.request_id"] for span in spans.taken()] == ["c", "c"]
