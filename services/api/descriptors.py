"""File descriptors: the public servers need one for each connection, and some for everything else."""

from __future__ import annotations

import resource

from services.api.config import PublicServerConfig
from speculation.errors import ConfigurationError

# For files, links to other components, processes, and Ray's own connections.
_OTHERS = 512


def make_room(config: PublicServerConfig, *, http: bool) -> None:
    """Raise the number of files that this process may open at once to what the public servers may need.

    Args:
        http: whether there is an HTTP server, which has as many connections as that of gRPC.

    Raises:
        ConfigurationError: as ``check_room``.
    """
    check_room(config, http=http)
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, _needed(config, http)), most))


def check_room(config: PublicServerConfig, *, http: bool) -> None:
    """Check that this process may open as many files as the public servers may need.

    Raises:
        ConfigurationError: it may not.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or _needed(config, http) <= most:
        return
    raise ConfigurationError(
        f"{most} files may be open (ulimit -Hn), and {_OTHERS} are kept for all else than connections",
        field="server.max_connections",
        value=config.max_connections,
        given="for gRPC and for HTTP each" if http else "",
        allowed=f"at most {max(0, most - _OTHERS) // (2 if http else 1)}",
    )


def _needed(config: PublicServerConfig, http: bool) -> int:
    return _OTHERS + config.max_connections * (2 if http else 1)
