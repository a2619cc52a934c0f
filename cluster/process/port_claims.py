"""Who shares a port of this machine: the routers of one service may, those of two must not.

By hand: claims live where ports do, in the network namespace, and end with their process. A lock of filelock lives in
a file system, which containers on one network need not share, and one router holds it, not all of a service.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from speculation.errors import ConfigurationError

# Every socket of a Unix domain in this network namespace, which is where ports are, too. The zero byte that an abstract name
# begins with is shown as @.
_SOCKETS = Path("/proc/net/unix")
_AGAIN_S = 0.01


class PortClaim:
    """Tells others on this machine, until it is closed or the process ends, that a router of a service is at an address."""

    def __init__(self, name: str) -> None:
        self._socket = _named(name)

    def close(self) -> None:
        """Claim the port no more."""
        self._socket.close()


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
        ConfigurationError: another service has the port; or, from ``check``, another program.
    """
    if not os.access(_SOCKETS, os.R_OK):
        return None
    at, own = f"outrider-port/{_short(address)}/", _short(service)
    # One at a time: ``check`` takes the port for a moment, in which another router would find it taken.
    async with _alone(f"{at}lock"):
        found = [name.removeprefix(f"@{at}").partition("/")[0] for name in _names() if name.startswith(f"@{at}")]
        services = {each for each in found if each != "lock"}
        if services - {own}:
            raise ConfigurationError(
                f"cannot listen on {address}: the routers of another service share this port; choose another one",
                about=address,
            )
        if not services:
            check()
        return PortClaim(f"{at}{own}/{uuid.uuid4().hex[:16]}")


@asynccontextmanager
async def _alone(name: str) -> AsyncIterator[None]:
    while True:
        try:
            held = _named(name)
            break
        except OSError:
            await asyncio.sleep(_AGAIN_S)
    with held:
        yield


def _named(name: str) -> socket.socket:
    """A socket with an abstract name, which ends with its process.

    Raises:
        OSError: the name is taken.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        raise
    return made


def _names() -> list[str]:
    return [line.rpartition(" ")[2] for line in _SOCKETS.read_text(errors="replace").splitlines()]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
