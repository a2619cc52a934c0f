"""Mutual TLS between components: each proves its role with a certificate; files are read again when they have changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc
import grpc.aio

from services.access.refused_components import RefusedComponents
from services.links.status import Context
from services.links.tls.component_files import ComponentTls, mismatch, name_of
from services.links.tls.renewed_files import RenewedFiles
from speculation.errors import Unauthenticated


def _kept(files: ComponentTls) -> RenewedFiles:
    return RenewedFiles((files.key, files.certificate, files.ca), lambda: mismatch(files))


def server_credentials(files: ComponentTls) -> grpc.ServerCredentials:
    """Credentials of a server that asks for client certificates."""
    return renewed_credentials(_kept(files), asks_clients=True)


def renewed_credentials(kept: RenewedFiles, *, asks_clients: bool = False) -> grpc.ServerCredentials:
    """Credentials that new connections see anew when the files have changed; those that exist live on.

    Args:
        kept: key and certificate chain, and where clients are asked for theirs, those of the authority.
    """

    def configuration(content: tuple[bytes, ...]) -> Any:
        key, certificate, *ca = content
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca[0] if ca else None)

    def fetch() -> Any:
        # gRPC asks at every handshake; None: nothing new.
        content, changed = kept.content()
        return configuration(content) if changed else None

    return grpc.dynamic_ssl_server_credentials(
        configuration(kept.content()[0]), fetch, require_client_authentication=asks_clients
    )


class CallerTls:
    """Credentials of a component that calls another one, read for every new channel.

    Args:
        files: the caller's.
        callee: the role of whom it calls; the server's certificate must name it.
    """

    def __init__(self, files: ComponentTls, callee: str) -> None:
        self._kept = _kept(files)
        self._callee = callee

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to "host:port"."""
        (key, certificate, ca), _ = self._kept.content()
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        named = [*options, ("grpc.ssl_target_name_override", name_of(self._callee))]
        return grpc.aio.secure_channel(address, credentials, options=named)

    async def renewed(self) -> None:
        """Wait until the files have changed: a channel made before shows the old certificate as long as it lives."""
        await self._kept.renewed()


def check_caller(context: Context, roles: Collection[str], refused: RefusedComponents) -> None:
    """Check that a call comes from a component in one of ``roles``.

    Args:
        refused: where refused calls are told.

    Raises:
        Unauthenticated: its certificate names none of them.
    """
    names = {name.decode(errors="replace") for name in context.auth_context().get("x509_subject_alternative_name", ())}
    if not names & {name_of(role) for role in roles}:
        refused.note("wrong_certificate", context.peer(), ", ".join(sorted(names)) or "nobody")
        raise Unauthenticated(f"the certificate must name {' or '.join(name_of(role) for role in roles)}")
