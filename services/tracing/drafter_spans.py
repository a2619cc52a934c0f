"""A drafter whose sessions become spans below those of the verifier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer

from services.tracing.trace_context import set_attributes, span_above, traceparent_of_span
from speculation.columns import DraftColumns, ReportColumns
from speculation.messages import CloseSession, Draft, DraftFailure, FeatureChunk, ForgetTenant, OpenSession, StepReport
from speculation.ports import Drafter, DraftsAtOnce, DraftsTogether

# Sessions that nobody closes, such as those that the drafter dropped for want of room, must not stay for ever.
_MOST_OPEN = 4096


@dataclass(slots=True)
class _Session:
    span: Span
    sources: tuple[str, ...]
    steps: int = 0
    drafts: int = 0
    nodes: int = 0
    failures: int = 0

    def end(self) -> None:
        told = {"steps": self.steps, "drafts": self.drafts, "drafted": self.nodes, "failures": self.failures}
        set_attributes(self.span, {f"outrider.{name}": value for name, value in told.items()})
        set_attributes(self.span, {"outrider.sources": self.sources})
        self.span.end()


class TracedDrafter:
    """Implements ``speculation.ports.Drafter`` in front of another one: a span for each session whose trace is known."""

    def __init__(self, drafter: Drafter, tracer: Tracer) -> None:
        self._drafter = drafter
        self._at_once = drafter if isinstance(drafter, DraftsAtOnce) else None
        self._together = drafter if isinstance(drafter, DraftsTogether) else None
        self._tracer = tracer
        self._open: OrderedDict[str, _Session] = OrderedDict()

    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        self._end(message.session_id)
        if message.traceparent:
            above: Context = span_above(message.traceparent)
            span = self._tracer.start_span("draft", above, SpanKind.INTERNAL)
            set_attributes(span, {"outrider.request_id": message.session_id})
            self._open[message.session_id] = _Session(span, message.sources)
            if len(self._open) > _MOST_OPEN:
                self._end(next(iter(self._open)))
            message = replace(message, traceparent=traceparent_of_span(span) or message.traceparent)
        return self._seen(message.session_id, await self._drafter.open(message))

    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        if (session := self._open.get(message.session_id)) is not None:
            session.steps += 1
        return self._seen(message.session_id, await self._drafter.step(message))

    def at_once(self, message: StepReport) -> Draft | DraftFailure | None:
        """As ``speculation.ports.DraftsAtOnce.at_once``."""
        reply = None if self._at_once is None else self._at_once.at_once(message)
        if reply is not None and (session := self._open.get(message.session_id)) is not None:
            session.steps += 1
        return self._seen(message.session_id, reply)

    def together(self, reports: ReportColumns) -> DraftColumns | None:
        """As ``speculation.ports.DraftsTogether.together``."""
        drafts = None if self._together is None else self._together.together(reports)
        if drafts is None or not self._open:
            return drafts
        for name, nodes in zip(drafts.session_ids, drafts.node_counts, strict=True):
            if (session := self._open.get(name)) is not None:
                session.steps += 1
                session.drafts += nodes > 0
                session.nodes += nodes
        return drafts

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        async for draft in self._drafter.further(session_id):
            self._seen(session_id, draft)
            yield draft

    def _seen(self, session_id: str, reply: Draft | DraftFailure | None) -> Draft | DraftFailure | None:
        if (session := self._open.get(session_id)) is not None:
            if isinstance(reply, DraftFailure):
                session.failures += 1
            elif reply is not None and len(reply.tree):
                session.drafts += 1
                session.nodes += len(reply.tree)
        return reply

    def features(self, message: FeatureChunk) -> None:
        self._drafter.features(message)

    def close(self, message: CloseSession) -> None:
        self._end(message.session_id)
        self._drafter.close(message)

    async def forget(self, message: ForgetTenant) -> None:
        await self._drafter.forget(message)

    def _end(self, session_id: str) -> None:
        if (session := self._open.pop(session_id, None)) is not None:
            session.end()
