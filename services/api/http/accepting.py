"""Takes connections for uvicorn: as many as there are places, TLS handshakes included, and slowly where descriptors run out.

asyncio counts no handshakes, waits for each of them for a minute, and where there is no descriptor left, it logs thousands
of tracebacks a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from typing_extensions import override

from services.api.http.arriving_requests import Arriving
from services.api.http.connections import ConnectionPlace, ConnectionPlaces
from services.logs.sparse import SparseLog

log = logging.getLogger(__name__)

# Of a TLS handshake.
_HANDSHAKE_S = 10.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Seconds between tries while they last, and between lines in the log about it.
_PAUSE_S, _COMPLAIN_S = 0.25, 60.0


class AcceptingServer(uvicorn.Server):
    """A uvicorn server on sockets of ours.

    Args:
        config: its protocol is one of ``arriving_within``.
        listening: a socket that listens; closed when the server stops.
        most_connections: at once, idle ones included.
    """

    def __init__(self, config: uvicorn.Config, listening: socket.socket, most_connections: int) -> None:
        super().__init__(config)
        self._listening = listening
        self._places = ConnectionPlaces(most_connections)

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own matter."""
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        await self.lifespan.startup()
        self.servers = [_Listener(self._listening, self._protocol, self.config.ssl, self._places)]  # type: ignore[list-item]
        self.started = True

    def _protocol(self) -> Arriving:
        made: Arriving = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


class _Listener:
    """Takes the connections of one socket; the part of ``asyncio.Server`` that uvicorn uses."""

    def __init__(
        self,
        listening: socket.socket,
        protocol: Callable[[], Arriving],
        tls: ssl.SSLContext | None,
        places: ConnectionPlaces,
    ) -> None:
        listening.setblocking(False)
        self._socket = listening
        self._protocol = protocol
        self._tls = tls
        self._places = places
        self._complaints = SparseLog(log, every_s=_COMPLAIN_S)
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="accepting")
        self._accepting.add_done_callback(lambda _: listening.close())

    def close(self) -> None:
        """Take no more connections."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is left of it but its connections."""
        for task in self._shaking:
            task.cancel()
        await asyncio.gather(self._accepting, *self._shaking, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._socket)
            except OSError as error:
                exhausted = error.errno in _EXHAUSTED
                if exhausted:
                    self._complaints.error(
                        "exhausted", "connections have to wait: %s; raise the limit of open files", error.strerror
                    )
                await asyncio.sleep(_PAUSE_S if exhausted else 0)
                continue
            if (place := self._places.take(str(address[0]))) is None:
                connection.close()
                continue
            task = asyncio.create_task(self._begin(connection, place))
            place.give_way = task.cancel
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _begin(self, connection: socket.socket, place: ConnectionPlace) -> None:
        protocol = self._protocol()
        protocol.place = place
        timeout_s = None if self._tls is None else _HANDSHAKE_S
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except BaseException as error:
            place.release()
            connection.close()
            if not isinstance(error, OSError | asyncio.CancelledError):
                raise
