"""Sends spans to a collector over OTLP. OpenTelemetry's SDK is an extra; without it nothing here can be used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer

from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# A collector that does not answer is tried again for so long; what it has not taken then is dropped.
_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Tracing:
    """A tracer, and what sends its spans."""

    tracer: Tracer
    provider: TracerProvider

    def stop(self) -> None:
        """Send what is left; blocks for a few seconds if nobody takes it."""
        self.provider.shutdown()


def check_tracing() -> None:
    """Check that spans can be exported.

    Raises:
        ConfigurationError: OpenTelemetry's SDK or its exporter is not installed.
    """
    try:
        for name in ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"):
            metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise ConfigurationError(
            "pip install 'outrider-server[tracing]'",
            field="tracing.otlp_endpoint",
            value="set",
            given=f"but {error.name} is not installed",
        ) from error


def tracing_to(endpoint: str, sample_ratio: float, component: str) -> Tracing:
    """A tracer whose spans go to ``endpoint``. It is no global one: other libraries' spans are their own.

    Args:
        endpoint: http:// (plain text) or https:// URL of a collector that speaks OTLP over gRPC.
        sample_ratio: share of the traces that begin here; where the caller brings one, it decides.
        component: what this process is.

    Raises:
        ConfigurationError: see ``check_tracing``.
    """
    check_tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_NAMESPACE, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    version = metadata.version("outrider-server")
    named = {SERVICE_NAME: f"outrider-{component}", SERVICE_NAMESPACE: "outrider", SERVICE_VERSION: version}
    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(sample_ratio), resource=Resource.create(named), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer("outrider", version), provider)
