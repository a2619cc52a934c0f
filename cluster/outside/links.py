"""Links to components that run outside of the service: a drafter, and verifiers."""

from __future__ import annotations

from cluster.settings.config import Settings
from cluster.settings.recognition import caller_tls, with_token
from services.links.grpc_draft import GrpcDraftLink
from services.links.grpc_verifier import GrpcVerifierLink


def outside_link(settings: Settings) -> GrpcDraftLink | None:
    """The verifier's link to the drafter at ``drafter.address``; None: there is none, the service has its own.

    Raises:
        ConfigurationError: the file of the token cannot be read.
    """
    address = settings.drafter.address
    if address is None:
        return None

    async def resolve() -> str:
        return address

    return GrpcDraftLink(resolve, with_token(settings).internal_token, caller_tls(settings, "verifier"), elsewhere=True)


def verifier_links(settings: Settings) -> list[GrpcVerifierLink]:
    """The router's links to the verifiers at ``router.verifiers``.

    Raises:
        ConfigurationError: the file of the token cannot be read.
    """
    token = with_token(settings).internal_token
    return [GrpcVerifierLink(address, token, caller_tls(settings, "router")) for address in settings.router.verifiers]
