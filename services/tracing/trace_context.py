"""W3C Trace Context: from a ``traceparent`` to a span's parent, and back."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_TRACEPARENT = "traceparent"
_W3C = TraceContextTextMapPropagator()


def span_above(traceparent: str) -> Context:
    """What a span is below; nothing, where ``traceparent`` is empty."""
    return _W3C.extract({_TRACEPARENT: traceparent}, Context())


def traceparent_of_span(span: Span) -> str:
    """What spans below this one are told; empty: it is not traced."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get(_TRACEPARENT, "")


def set_attributes(span: Span, attributes: Mapping[str, AttributeValue]) -> None:
    """Set attributes of a span that is sent."""
    if span.is_recording():
        span.set_attributes(attributes)
