"""How components recognise each other: by a token, and by TLS files of their own (``cluster.tls``)."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.settings.config import Settings
from services.links.tls.component_files import CALLERS, ComponentTls, check_files
from services.model_files.folder import reading
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.links.tls.mutual import CallerTls

_SHORTEST = 16


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


def with_token(settings: Settings) -> Settings:
    """``settings`` with a token: the named one, that of the named file, or one of our own.

    On a Ray that asks for a token ours follows from Ray's and from the service's name, so that the same service deployed
    again has the same; elsewhere it is drawn.

    Raises:
        ConfigurationError: both are named, or the file cannot be read or holds too little.
    """
    file, token = settings.internal_token_file, settings.internal_token
    if file is not None:
        if token is not None:
            raise ConfigurationError("set one of the two", field="internal_token and internal_token_file")
        with reading(f"read internal_token_file {file}", about=file):
            token = file.read_text(encoding="utf-8").strip()
        if len(token) < _SHORTEST:
            raise ConfigurationError(
                f"holds {len(token)} characters; must hold at least {_SHORTEST}", field="internal_token_file", value=file
            )
    if token is None:
        shared = os.environ.get("RAY_AUTH_TOKEN", "")
        named = f"outrider internal token of {settings.cluster.name}".encode()
        token = hmac.digest(shared.encode(), named, hashlib.sha256).hex() if shared else secrets.token_hex(32)
    return settings.model_copy(update={"internal_token": token, "internal_token_file": None})


def check_shared_secrets(settings: Settings, *, host: str) -> None:
    """Check that a link to or from ``host`` can be trusted.

    Raises:
        ConfigurationError: the two ends have no token in common, or the link leaves this machine without mutual TLS.
    """
    if settings.internal_token is None and settings.internal_token_file is None:
        raise ConfigurationError(
            "a component elsewhere cannot know a token that is drawn at start; name the same one on both sides",
            field="internal_token_file",
            value="null",
        )
    if settings.cluster.tls is None and not _is_loopback(host):
        raise ConfigurationError(
            "users' texts would cross the network in the clear; name its three files on both sides",
            field="cluster.tls",
            value="null",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
