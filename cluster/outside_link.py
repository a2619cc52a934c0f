"""The verifier's link to a drafter outside of the service."""

from __future__ import annotations

from cluster.settings.component_tls import caller_tls
from cluster.settings.config import Settings
from services.links.grpc_draft import GrpcDraftLink


def outside_link(settings: Settings) -> GrpcDraftLink | None:
    """The link to the drafter at ``drafter.address``; None: there is none, the service has its own."""
    address = settings.drafter.address
    if address is None:
        return None

    async def resolve() -> str:
        return address

    return GrpcDraftLink(resolve, settings.internal_token, caller_tls(settings, "verifier"))
