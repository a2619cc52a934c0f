"""The address of the ops listener, checked without starting it."""

from __future__ import annotations

import errno
import socket

from speculation.errors import ConfigurationError


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
