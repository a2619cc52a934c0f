"""What the components' links need of gRPC: bidirectional streams, over simulated connections. Messages travel as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Never

import grpc
import grpc.aio

from tests.simulation.fault_points import FaultPoints
from tests.simulation.network import Connection, Inbox, Network
from tests.simulation.virtual_loop import Process, current_process

# Seconds between looks whether a server is there, and by which a reply may be late.
_LOOK_S, _LATE_S = 0.5, 2.0
_END = object()
Metadata = Sequence[tuple[str, str]]


class Servers:
    """The gRPC servers that listen now, by address."""

    def __init__(self) -> None:
        self.listening: dict[str, Server] = {}


class Server:
    """Stands for ``grpc.aio.Server`` where generated code adds its handlers."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The registered handlers are enough."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Take a service's methods."""
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class SimulatedTls:
    """Implements what ``stay_connected`` asks of a ``CallerTls``: its channels are simulated.

    Args:
        kind: names the fault points of its streams: "drafts" or "retrieval".
    """

    def __init__(self, servers: Servers, network: Network, faults: FaultPoints, kind: str) -> None:
        self._servers, self._network, self._faults, self._kind = servers, network, faults, kind

    def channel(self, address: str, options: object) -> Channel:
        """A channel to a server, by its name."""
        return Channel(self._servers, self._network, self._faults, self._kind, address)

    async def renewed(self) -> None:
        """Nothing is ever renewed."""
        await asyncio.get_running_loop().create_future()


class Channel:
    """Stands for ``grpc.aio.Channel``."""

    def __init__(self, servers: Servers, network: Network, faults: FaultPoints, kind: str, address: str) -> None:
        self._servers, self._network, self._address = servers, network, address
        self.faults, self.kind = faults, kind

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def channel_ready(self) -> None:
        """Wait until the server can be reached."""
        await asyncio.sleep(self._network.delay())
        while self.server is None:
            await asyncio.sleep(_LOOK_S)

    @property
    def server(self) -> Server | None:
        """The server; None: it cannot be reached now."""
        server = self._servers.listening.get(self._address)
        if server is None or server.process.dead or self._network.is_cut(current_process(), server.process):
            return None
        return server

    def stream_stream(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., Call]:
        """As gRPC's."""
        return lambda requests, metadata=(): Call(self, path, requests, request_serializer, response_deserializer, metadata)

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Never]:
        """As gRPC's, for stubs that want one for each method. Nothing here is asked in this way."""

        def call(*_: object, **__: object) -> Never:
            raise NotImplementedError(f"{path} in a simulation")

        return call

    def connect(self, server: Server) -> Connection:
        """A connection to the server."""
        return self._network.connect(current_process(), server.process)


class Call:
    """A stream as its caller has it."""

    def __init__(
        self,
        channel: Channel,
        path: str,
        requests: AsyncIterator[Any],
        write: Callable[[Any], bytes],
        read: Callable[[bytes], Any],
        metadata: Metadata,
    ) -> None:
        self._read, self._faults, self._kind = read, channel.faults, channel.kind
        self._replies = Inbox()
        self._server: _Answering | None = None
        server = channel.server
        if server is None:
            self._replies.put(_broken())
            return
        self._me = current_process()
        connection = self._connection = channel.connect(server)
        connection.when_ended(self._me, lambda: self._replies.put(_broken()))
        answering = self._server = _Answering(connection, server, path, self._came, channel, metadata)
        connection.send(self._me, answering.begin)
        self._sending = asyncio.create_task(self._send(requests, write, answering))

    async def _send(self, requests: AsyncIterator[Any], write: Callable[[Any], bytes], answering: _Answering) -> None:
        async for request in requests:
            if self._kind == "drafts" and self._faults.fires("drafts: a call is lost"):
                continue
            self._connection.send(self._me, answering.requests.put, write(request))
        self._connection.send(self._me, answering.requests.put, _END)

    def _came(self, reply: object) -> None:
        self._replies.put(reply)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (reply := await self._replies.get()) is not _END:
            assert isinstance(reply, bytes)
            yield self._read(reply)

    async def initial_metadata(self) -> Metadata:
        """The server's; it is asked for after the first reply."""
        assert self._server is not None
        return self._server.context.sent

    def cancel(self) -> None:
        """Give the stream up."""
        self._replies.put(asyncio.CancelledError())
        if self._server is not None:
            self._connection.end()


class _Answering:
    """A stream as its server has it."""

    def __init__(
        self,
        connection: Connection,
        server: Server,
        path: str,
        came: Callable[[object], None],
        channel: Channel,
        metadata: Metadata,
    ) -> None:
        self.context = _Context(metadata)
        self.requests = Inbox()
        self._connection, self._server, self._came = connection, server, came
        self._handler = server.handlers[path]
        self._faults, self._kind = channel.faults, channel.kind

    def begin(self) -> None:
        """Answer, in the server's process."""
        task = asyncio.create_task(self._answer())
        self._connection.when_ended(self._server.process, task.cancel)

    async def _answer(self) -> None:
        me, write = self._server.process, self._handler.response_serializer
        replies = self._handler.stream_stream(self._read(), self.context)
        try:
            async for reply in replies:
                self._reply(me, write(reply))
            self._connection.send(me, self._came, _END)
        except grpc.aio.AbortError as error:
            self._connection.send(me, self._came, _broken(str(error)))
        finally:
            await replies.aclose()

    def _reply(self, me: Process, data: bytes) -> None:
        fires, kind = self._faults.fires, self._kind
        if fires(f"{kind}: the stream breaks"):
            self._connection.end()
            return
        if fires(f"{kind}: a reply is lost"):
            return
        late_s = _LATE_S if fires(f"{kind}: a reply is very late") else 0.0
        if kind == "drafts" and fires("drafts: a reply is overtaken"):
            self._connection.send_past(me, self._came, data)
            return
        for _ in range(2 if kind == "drafts" and fires("drafts: a reply comes twice") else 1):
            self._connection.send(me, self._came, data, late_s=late_s)

    async def _read(self) -> AsyncIterator[Any]:
        while (request := await self.requests.get()) is not _END:
            yield self._handler.request_deserializer(request)


class _Context:
    """What the servicers ask of their context.

    Attributes:
        sent: the initial metadata of the server.
    """

    def __init__(self, received: Metadata) -> None:
        self._received = received
        self.sent: Metadata = ()

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """As gRPC's."""
        self.sent = metadata

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> None:
        """As gRPC's."""
        raise grpc.aio.AbortError(details)

    def trailing_metadata(self) -> tuple[()]:
        """None was set."""
        return ()

    def invocation_metadata(self) -> Metadata:
        """The caller's."""
        return self._received


def _broken(why: str = "the connection was lost") -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=why)
