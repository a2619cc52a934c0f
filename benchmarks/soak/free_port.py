"""Ports for processes that must be told one."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to connections that go out (from 32768 on): such a one may take a port before the process that
# was told it listens. Above those of Ray's workers.
_PORTS = range(20_000, 32_768)
# Tests may seed the usual one, in several processes alike.
_random = random.SystemRandom()


def free_port() -> int:
    """A loopback port that nobody holds now."""
    while True:
        port = _random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
