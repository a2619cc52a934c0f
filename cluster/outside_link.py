"""The verifier's link to a drafter outside of the service."""

from __future__ import annotations

from cluster.ray.internal_token import with_token
from cluster.settings.component_tls import caller_tls
from cluster.settings.config import Settings
from services.links.grpc_draft import GrpcDraftLink


def outside_link(settings: Settings) -> GrpcDraftLink | None:
    """The link to the drafter at ``drafter.address``; None: there is none, the service has its own.

    Raises:
        ConfigurationError: the file of the token cannot be read.
    """
    address = settings.drafter.address
    if address is None:
        return None

    async def resolve() -> str:
        return address

    return GrpcDraftLink(resolve, with_token(settings).internal_token, caller_tls(settings, "verifier"))
