"""A TCP relay between two components whose network fails by order: cut, stalled, slow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

_PIECE = 64 << 10


class Relay:
    """Listens on a loopback port and passes bytes on to ``backends``, each connection to the next one that accepts it.

    One that hangs accepts as well: its kernel does. Whoever connects anew is not sent there again at once.

    Attributes:
        port: where it listens.
        delay_s, jitter_s: how long each piece of bytes waits, in both directions.
        held: pieces that wait for the end of a stall.
    """

    def __init__(self, backends: Sequence[int], seed: int = 0) -> None:
        self.port = 0
        self.delay_s = self.jitter_s = 0.0
        self.held = 0
        self._backends = list(backends)
        self._random = random.Random(seed)
        self._flows = asyncio.Event()
        self._flows.set()
        self._open = True
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self._drop()

    async def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End all connections and accept no more."""
        self._open = False
        self._drop()

    def stall(self) -> None:
        """Nothing passes, and nobody is told: what a pulled cable looks like."""
        self._flows.clear()

    def slow(self, delay_s: float, jitter_s: float) -> None:
        self.delay_s, self.jitter_s = delay_s, jitter_s

    def heal(self) -> None:
        """End all faults."""
        self._open = True
        self._flows.set()
        self.slow(0.0, 0.0)

    def _drop(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self._open:
                await self._pass_on(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in list(self._backends):
            self._backends.append(self._backends.pop(0))
            with suppress(OSError):
                to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
                break
        else:
            return
        ways = [asyncio.ensure_future(self._flow(*way)) for way in ((reader, to_writer), (to_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            to_writer.transport.abort()

    async def _flow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                if self.delay_s or self.jitter_s:
                    await asyncio.sleep(self.delay_s + self.jitter_s * self._random.random())
                self.held += 1
                await self._flows.wait()
                self.held -= 1
                writer.write(piece)
                await writer.drain()
