"""Every address on which components listen, for `outrider plan` and for firewall rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.settings.config import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """An address on which a component listens.

    Attributes:
        component: whose it is.
        name: grpc and http (the public API), ops (metrics and health), drafts, lookups, stages.
        port: None: any free one.
        callers: who has reason to call it.
    """

    component: str
    name: str
    host: str
    port: int | None
    callers: Literal["clients", "operators", "components"]


def listeners(settings: Settings) -> tuple[Listener, ...]:
    """What listens. Ray's own processes, which listen besides, are not ours to name."""
    server, verifier = settings.server, settings.verifier
    found = [Listener(component="router", name="grpc", host=server.host, port=server.port or None, callers="clients")]
    if server.http is not None:
        port = server.http or None
        found.append(Listener(component="router", name="http", host=server.host, port=port, callers="clients"))
    if server.ops is not None:
        port = server.ops or None
        found.append(Listener(component="router", name="ops", host=server.ops_host, port=port, callers="operators"))
    if settings.router.verifiers:
        return tuple(found)
    drafter = settings.drafter
    if drafter.address is None:
        found.append(Listener(component="drafter", name="drafts", host=drafter.host, port=None, callers="components"))
    if settings.retrieval.enabled and drafter.address is None:
        host = settings.retrieval.host
        found.append(Listener(component="retrieval", name="lookups", host=host, port=None, callers="components"))
    if verifier.processes > 1:
        host = verifier.stage_host
        found.append(Listener(component="verifier", name="stages", host=host, port=None, callers="components"))
    return tuple(found)
