"""The one place that resolves hosts, and makes and binds sockets that others connect to."""

from __future__ import annotations

import socket

# The family, and the address as the system takes it.
Address = tuple[int, tuple[object, ...]]


def addresses_of(host: str, port: int = 0, flags: int = 0) -> list[Address]:
    """The address family and address of everything that ``host`` names.

    Raises:
        OSError, UnicodeError: it names nothing.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=flags)
    return [(entry[0], entry[4]) for entry in found]


def bind(family: int, address: tuple[object, ...], *, shared: bool = False) -> socket.socket:
    """A socket that is bound to one of ``addresses_of``.

    Args:
        shared: whether other sockets may share the port. The system still refuses a port that somebody holds without sharing
            it, or another user.

    Raises:
        OSError: the address is taken, or not one of this machine.
    """
    # asyncio turns off Nagle's algorithm for sockets that name their protocol. With it, an answer's body waits 40 ms for the
    # client's acknowledgement of the headers, and so does each event of a stream.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
