"""What a service and a component outside of it must both be told."""

from __future__ import annotations

import ipaddress

from cluster.settings.config import Settings
from speculation.errors import ConfigurationError


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
