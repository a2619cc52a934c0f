"""The HTTP server's own socket."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace

from services.api.config import HttpConfig, check_server
from speculation.errors import ConfigurationError

_BACKLOG = 2048


def check_http(config: HttpConfig, *, first: bool = False) -> None:
    """Check that the server could be started, without starting it.

    Args:
        first: as in ``services.api.config.check_server``.

    Raises:
        ConfigurationError: see ``check_server``, or the port is taken.
    """
    if config.public.shared and not config.port:
        raise ConfigurationError("server.http_port is 0: several routers share one port; name it")
    alone = replace(config.public, port=0, shared=False)
    # The gRPC server's own port may be taken by that very server.
    check_server(alone)
    _bound(replace(config, public=alone) if first else config).close()


def listen(config: HttpConfig) -> socket.socket:
    """A socket that listens at the configured address.

    Raises:
        ConfigurationError: the address is taken or not of this machine.
    """
    listening = _bound(config)
    try:
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _refusal(config, error) from error
    listening.setblocking(False)
    return listening


def _bound(config: HttpConfig) -> socket.socket:
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if config.public.shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        raise _refusal(config, error) from error
    return bound


def _refusal(config: HttpConfig, error: Exception) -> ConfigurationError:
    why = getattr(error, "strerror", None) or error
    return ConfigurationError(
        f"cannot listen on {config.host}:{config.port} ({why}); choose another server.http_port (0: any free one, "
        "null: no HTTP)"
    )


def bind_ops(host: str, port: int) -> socket.socket:
    """A socket that is bound to the listener's address.

    Raises:
        ConfigurationError: the address is taken, or not one of this machine; says which setting to change.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"server.ops_host is {host}: no such host ({why})") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        where = f"cannot listen on {host}:{port} for metrics and health ({error.strerror})"
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigurationError(f"{where}; server.ops_host must be the address of one of this machine's") from error
        raise ConfigurationError(
            f"{where}; choose another server.ops_port (0: any free one, null: none): another service, or another program, "
            "has this one"
        ) from error
    return bound
