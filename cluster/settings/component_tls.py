"""The TLS files by which components recognise each other (``cluster.tls``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.settings.config import Settings
from services.links.tls.component_files import CALLERS, ComponentTls, check_files

if TYPE_CHECKING:
    from services.links.tls.mutual import CallerTls


def server_tls(settings: Settings, role: str) -> ComponentTls | None:
    """The files of the component in ``role``; None without ``cluster.tls``."""
    tls = settings.cluster.tls
    if tls is None:
        return None
    certificate, key, ca = (Path(str(file).replace("{role}", role)) for file in (tls.certificate, tls.key, tls.ca))
    return ComponentTls(role=role, certificate=certificate, key=key, ca=ca)


def caller_tls(settings: Settings, role: str) -> CallerTls | None:
    """Credentials with which the component in ``role`` calls the one that it may call; None without ``cluster.tls``."""
    # Imports gRPC, which commands that only read settings do without.
    from services.links.tls.mutual import CallerTls

    files = server_tls(settings, role)
    callee = next(callee for callee, callers in CALLERS.items() if role in callers)
    return None if files is None else CallerTls(files, callee)


def check_tls_files(settings: Settings) -> None:
    """Check the files of every component that the service starts.

    Raises:
        ConfigurationError: one cannot be used; says why.
    """
    roles = ["router"] if settings.router.verifiers else ["verifier"]
    if not settings.router.verifiers and settings.drafter.address is None:
        roles += ["drafter", *(["retrieval"] if settings.retrieval.enabled else [])]
    for role in roles:
        if (files := server_tls(settings, role)) is not None:
            check_files(files)
