"""Calls between components that are refused because the caller has not shown that it is one: logged, recorded, counted."""

from __future__ import annotations

import logging

from services.access.audit import AuditLog
from services.logs.sparse import SparseLog
from services.metrics.registry import DROPPED, Metrics

log = logging.getLogger(__name__)

# Seconds between lines of the log for one reason: whoever tries without end must not fill it.
_AGAIN_S = 60.0


class RefusedComponents:
    """Where a component's server says whom it has refused.

    Args:
        component: whose server it is: verifier, drafter or retrieval.
        audit: gets a line for each call; None: none.
    """

    def __init__(
        self,
        component: str = "component",
        audit: AuditLog | None = None,
        metrics: Metrics = DROPPED,
    ) -> None:
        self._component = component
        self._audit = audit or AuditLog()
        self._count = metrics.counter("component_auth_failures_total")
        self._complaints = SparseLog(log, every_s=_AGAIN_S)

    def note(self, reason: str, address: str, shown: str = "") -> None:
        """A call has been refused.

        Args:
            reason: no_token, unknown_token or wrong_certificate.
            shown: whom the caller's certificate names.
        """
        self._count.add(1, self._component, reason)
        self._audit.write(method="authenticate", component=self._component, outcome=reason, address=address, shown=shown)
        named = f", its certificate names {shown}" if shown else ""
        # Told even where nothing but errors is: nobody has reason to call but components.
        why = reason.replace("_", " ")
        self._complaints.error(reason, "the %s refuses calls: %s (from %s%s)", self._component, why, address, named)
