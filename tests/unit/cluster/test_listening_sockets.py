"""Connections to the ports that are listened on."""

from __future__ import annotations

import asyncio
import socket

from services.machine.sockets import bind


def test_no_answer_waits_for_an_acknowledgement() -> None:
    """An event of a stream, and a body behind its headers, are sent at once: Nagle's algorithm is off."""

    async def delays() -> int:
        with bind(socket.AF_INET, ("127.0.0.1", 0)) as listening:
            listening.listen()
            listening.setblocking(False)
            loop = asyncio.get_running_loop()
            with socket.create_connection(listening.getsockname()):
                accepted, _ = await loop.sock_accept(listening)
                transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
                try:
                    return int(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                finally:
                    transport.close()

    assert asyncio.run(delays())
