"""Lets the routers of one service share a port of this machine, and keeps those of two services from sharing it.

A claim is a named socket. It lives where ports do, in the network namespace, and ends with its process. filelock would not
do: its lock lives in a file system, which containers on one network need not share, and one router would hold it, not all of
a service.

Any user of the machine may take such a name. So only claims of our own user count; only its sockets can share the port.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import struct
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path

from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Every socket of a Unix domain in this network namespace, which is where ports are, too. The zero byte that an abstract name
# begins with is shown as @.
_SOCKETS = Path("/proc/net/unix")
_AGAIN_S = 0.01
# Looking whether a port is free takes milliseconds; who holds others up for so many seconds hangs.
_PATIENCE_S = 10.0
# One of ours that holds the name listens at once, so that its user can be asked for.
_SHOWS_S = 1.0
# Of a process, its user and its group: what SO_PEERCRED tells.
_CREDENTIALS = struct.Struct("3i")


class PortClaim:
    """Tells others on this machine, until it is closed or the process ends, that a router of a service is at an address."""

    def __init__(self, name: str) -> None:
        self._socket = _named(name)
        # Who looks whose claim it is connects. Left in the queue, such connections would fill it, and nobody could look.
        asyncio.get_running_loop().add_reader(self._socket, self._turn_away)

    def close(self) -> None:
        """Claim the port no more."""
        with suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _turn_away(self) -> None:
        with suppress(OSError):
            self._socket.accept()[0].close()


async def claim_port(address: str, service: str, check: Callable[[], None]) -> PortClaim | None:
    """Claim a port that is shared (SO_REUSEPORT).

    The system lets any program of the same user share it, and gRPC's servers do so by default. A router
    therefore claims its port, and starts only where the port is free or held by a router of its own service.

    Args:
        address: "host:port", as it is configured.
        service: names the service, on any Ray.
        check: whether the port is free.

    Returns:
        The claim; None where the system has no table to find others in, and nobody can be told apart.

    Raises:
        ConfigurationError: another service has the port, or one of our own user holds up all that start; or, from
            ``check``, another program has it.
    """
    if not os.access(_SOCKETS, os.R_OK):
        return None
    at, own = f"outrider-port/{_short(address)}/", _short(service)
    # One at a time: ``check`` takes the port for a moment, in which another router would find it taken.
    async with _alone(f"{at}lock", address):
        ours = [name.removeprefix(at) for name in _names() if name.startswith(at) and _user_of(name) == os.geteuid()]
        services = {name.partition("/")[0] for name in ours} - {"lock"}
        if services - {own}:
            raise ConfigurationError(
                f"cannot listen on {address}: the routers of another service share this port; choose another one",
                about=address,
            )
        if not services:
            check()
        return PortClaim(f"{at}{own}/{uuid.uuid4().hex[:16]}")


@asynccontextmanager
async def _alone(name: str, address: str) -> AsyncIterator[None]:
    """One process of our user at a time. Another user who holds the name keeps nobody waiting."""
    began = shown = time.monotonic()
    while True:
        with suppress(OSError):
            held: AbstractContextManager[object] = _named(name)
            break
        holder, now = _user_of(name), time.monotonic()
        if holder == os.geteuid():
            shown = now
        if now - began > _PATIENCE_S:
            raise ConfigurationError(
                f"cannot listen on {address}: another process of this user has begun to, and hangs; stop it", about=address
            )
        if holder not in (None, os.geteuid()) or now - shown > _SHOWS_S:
            log.warning("another user holds the name by which starts at %s wait for each other", address)
            held = nullcontext()
            break
        await asyncio.sleep(_AGAIN_S)
    with held:
        yield


def _named(name: str) -> socket.socket:
    """A socket with an abstract name, which ends with its process. It listens, so that others can ask whose it is.

    Raises:
        OSError: the name is taken.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.bind(f"\0{name}")
        made.listen(socket.SOMAXCONN)
    except OSError:
        made.close()
        raise
    return made


def _user_of(name: str) -> int | None:
    """The number of the user whose process listens at an abstract name; None: nobody does, or nobody takes connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asking:
        try:
            asking.connect(f"\0{name}")
        except OSError:
            return None
        user: int = _CREDENTIALS.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        return user


def _names() -> list[str]:
    listed = (line.rpartition(" ")[2] for line in _SOCKETS.read_text(errors="replace").splitlines())
    return [name.removeprefix("@") for name in listed if name.startswith("@")]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
