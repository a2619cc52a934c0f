"""Chooses the sinks of metrics and traces, and wraps the components in their observers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from cluster.settings.config import Settings
from cluster.settings.recognition import server_tls
from services.access.audit import AuditLog
from services.access.gate import Gate, open_gate
from services.access.refused_components import RefusedComponents
from services.api.config import PublicServerConfig
from services.api.messages import RouterPort
from services.links.tls.component_files import expires_at
from services.metrics.observed_drafter import LooksUpIndex, ObservedDrafter, ObservedRetrieval
from services.metrics.observed_router import ObservedRouter
from services.metrics.registry import DROPPED, Metrics
from speculation.errors import ConfigurationError
from speculation.ports import Drafter, VerifierPort

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from services.drafter.service import DrafterService


log = logging.getLogger(__name__)


class Observing:
    """What one process counts and traces.

    Attributes:
        exposition: what the ops port says.
        gathered: what the API port says: the numbers of all processes, also on Ray.

    Args:
        on_ray: whether the process is one of Ray's.
        component: what the process is, for traces.

    Raises:
        ConfigurationError: the place has no such export, or what traces need is not installed.
    """

    def __init__(self, settings: Settings, *, on_ray: bool, component: str = "server") -> None:
        self.exposition: Callable[[], bytes] = _nothing
        self.gathered: Callable[[], bytes] = _nothing
        self.metrics: Metrics = DROPPED
        export = export_of(settings, on_ray=on_ray)
        if export == "prometheus":
            from services.metrics.prometheus_sink import PrometheusSink

            sink = PrometheusSink()
            self.metrics = sink
            self.exposition = self.gathered = self._told(settings, sink.collect)
        elif export == "ray":
            from cluster.ray.metrics import RaySink, gathered, pointer

            self.metrics, self.exposition = RaySink(), pointer
            self.gathered = self._told(settings, gathered)
        self._model = ""
        self._tracing = None
        if (endpoint := settings.tracing.otlp_endpoint) is not None:
            from services.tracing.otlp_export import tracing_to

            self._tracing = tracing_to(endpoint, settings.tracing.sample_ratio, component)

    def _told(self, settings: Settings, collect: Callable[[], Iterable[Metric]]) -> Callable[[], bytes]:
        """Writes what is collected, by other servers' names as well where that is wanted."""
        from services.metrics.other_names import by_names_of
        from services.metrics.prometheus_sink import written

        def told() -> bytes:
            families = list(collect())
            return written([*families, *by_names_of(settings.metrics.names_of, families, self._model)])

        return told

    def router(self, router: RouterPort, model: str) -> RouterPort:
        """``router``, counted and traced; ``model`` is the name of the served one."""
        self._model = model
        observed: RouterPort = ObservedRouter(router, self.metrics)
        if self._tracing is not None:
            from services.tracing.request_spans import TracedRouter

            observed = TracedRouter(observed, self._tracing.tracer, model)
        return observed

    def verifier(self, verifier: VerifierPort) -> VerifierPort:
        """``verifier``, traced."""
        if self._tracing is None:
            return verifier
        from services.tracing.request_spans import TracedVerifier

        return TracedVerifier(verifier, self._tracing.tracer)

    def drafter(self, drafter: DrafterService) -> Drafter:
        """``drafter``, counted and traced."""
        self.metrics.follow("drafter_sessions", lambda: {(): drafter.sessions})
        self.metrics.follow("drafter_retrievals_missed_total", lambda: {(): drafter.retrievals_missed})
        if (shared := drafter.shared) is not None:
            self.metrics.follow("drafter_answers_total", lambda: {(what,): n for what, n in shared.outcomes.items()})
        observed: Drafter = drafter if self.metrics is DROPPED else ObservedDrafter(drafter, self.metrics)
        if self._tracing is None:
            return observed
        from services.tracing.drafter_spans import TracedDrafter

        return TracedDrafter(observed, self._tracing.tracer)

    def retrieval(self, service: LooksUpIndex) -> ObservedRetrieval:
        """``service``, counted."""
        return ObservedRetrieval(service, self.metrics)

    def gate(self, config: PublicServerConfig) -> Gate:
        """The gate of the public servers, counted; with it, how long their certificate lasts.

        Raises:
            ConfigurationError: see ``open_gate``.
        """
        if (tls := config.tls) is not None:
            # Read each time: it may be renewed.
            self.metrics.follow("certificate_expiry_timestamp_seconds", lambda: {(): expires_at(tls.certificate)})
        return open_gate(config.api_key_hashes, config.keys_file, config.audit_log, self.metrics)

    def component(self, settings: Settings, role: str) -> RefusedComponents:
        """Where the component in ``role`` tells of callers that it refuses; with it, how long its certificate lasts."""
        if (tls := server_tls(settings, role)) is not None:
            # Read each time: it may be renewed.
            self.metrics.follow(
                "component_certificate_expiry_timestamp_seconds", lambda: {(role,): expires_at(tls.certificate)}
            )
        try:
            audit = AuditLog(settings.server.audit_log)
        except ConfigurationError as error:
            # Made for the routers' machines; this one may lack the folder.
            log.warning("the %s keeps no audit log: %s", role, error)
            audit = AuditLog()
        return RefusedComponents(role, audit, self.metrics)

    async def stop(self) -> None:
        """Send the spans that have not been sent."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)


def export_of(settings: Settings, *, on_ray: bool) -> str:
    """Where numbers go: "prometheus", "ray" or "none".

    Raises:
        ConfigurationError: the place has no such export.
    """
    export = settings.metrics.export
    if export == "ray" and not on_ray:
        raise ConfigurationError(
            "this is one process without Ray; use prometheus, which server.ops_port serves, or none",
            field="metrics.export",
            value="ray",
        )
    if export == "prometheus" and on_ray:
        raise ConfigurationError(
            (
                "on Ray the components are processes of their own, on any machine, whose numbers Ray's agent on "
                "each node exports; use ray, or none"
            ),
            field="metrics.export",
            value="prometheus",
        )
    return export or ("ray" if on_ray else "prometheus")


def _nothing() -> bytes:
    return b"# metrics.export is none\n"
