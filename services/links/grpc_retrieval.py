"""The retrieval link over gRPC: one stream per drafter-retrieval pair. Concurrent queries share a message."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from typing_extensions import override

from outrider.internal.v1 import retrieval_pb2, retrieval_pb2_grpc
from services.access.refused_components import RefusedComponents
from services.links.auth import bearer
from services.links.codec import retrieval as codec
from services.links.guarded_calls import Guard
from services.links.internal import guard_of, serve_internal
from services.links.reconnect import stay_connected
from services.links.status import Context
from services.links.tls.component_files import ComponentTls
from services.links.tls.mutual import CallerTls
from speculation import limits
from speculation.errors import OutriderError, Unavailable
from speculation.messages import RetrievalQuery, Retrieved

log = logging.getLogger(__name__)


_MOST_WAITING, _MOST_UNANSWERED = 4096, 256
# A message takes no further query once its hidden states have this many bytes.
_FULL_BYTES = limits.MAX_DRAFT_MESSAGE_BYTES // 2


class LooksUp(Protocol):
    """The service behind the server, such as ``RetrievalService``."""

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """Answer several queries from one version of the index, in their order."""
        ...


@dataclass(kw_only=True, slots=True)
class _Waiting:
    query: RetrievalQuery
    answer: asyncio.Future[Retrieved]

    @property
    def size(self) -> int:
        """Bytes of its hidden states."""
        return 0 if self.query.state is None else len(self.query.state.data)


class GrpcRetrievalLink:
    """Implements ``speculation.ports.Retriever``. Reconnects for ever; while disconnected, every query fails at once.

    Args:
        resolve: gives the service's "host:port" before every attempt.
        token: the token that its server asks for; None: it asks for none.
        tls: credentials for mutual TLS; None: plain text.

    Attributes:
        channel: the connection; None while there is none.
    """

    def __init__(
        self, resolve: Callable[[], Awaitable[str]], token: str | None = None, tls: CallerTls | None = None
    ) -> None:
        self._resolve = resolve
        self._tls = tls
        self._talking: Any = None
        self.channel: grpc.aio.Channel | None = None
        self._metadata = bearer(token)
        self._asked: asyncio.Queue[_Waiting] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and keep connected until ``stop``."""
        connecting = stay_connected("retrieval", self._resolve, limits.MAX_DRAFT_MESSAGE_BYTES, self._talk, self._tls)
        self._task = asyncio.create_task(connecting, name="grpc-retrieval")

    async def stop(self) -> None:
        """Disconnect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def reconnect(self) -> None:
        """Give up the connection, and make one to the address that ``resolve`` gives now."""
        if self._asked is not None:
            self._asked = None
            self._talking.cancel()

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        if self._asked is None:
            raise Unavailable("the retrieval service is not there")
        waiting = _Waiting(query=query, answer=asyncio.get_running_loop().create_future())
        try:
            self._asked.put_nowait(waiting)
        except asyncio.QueueFull:
            raise Unavailable("the retrieval service does not answer") from None
        return await waiting.answer

    async def _talk(self, channel: grpc.aio.Channel) -> None:
        asked: asyncio.Queue[_Waiting] = asyncio.Queue(_MOST_WAITING)
        sent: dict[int, list[_Waiting]] = {}
        replies = retrieval_pb2_grpc.RetrievalServiceStub(channel).Retrieve(_requests(asked, sent), metadata=self._metadata)
        self._asked, self._talking, self.channel = asked, replies, channel
        try:
            async for reply in replies:
                _settle(sent.pop(reply.batch_id, []), reply)
        finally:
            self._asked = self.channel = None
            replies.cancel()
            gone = [waiting for batch in sent.values() for waiting in batch]
            while not asked.empty():
                gone.append(asked.get_nowait())
            for waiting in gone:
                if not waiting.answer.done():
                    waiting.answer.set_exception(Unavailable("the retrieval service went away"))


async def _requests(
    asked: asyncio.Queue[_Waiting], sent: dict[int, list[_Waiting]]
) -> AsyncIterator[retrieval_pb2.RetrieveRequest]:
    for batch_id in itertools.count(1):
        batch: list[_Waiting] = []
        while not batch:
            waiting = [await asked.get()]
            size = waiting[0].size
            while not asked.empty() and len(waiting) < limits.MAX_QUERIES and size < _FULL_BYTES:
                waiting.append(asked.get_nowait())
                size += waiting[-1].size
            # Callers that have given up meanwhile need no answer.
            batch = [each for each in waiting if not each.answer.done()]
        # Its callers hear of the end, too.
        sent[batch_id] = batch
        if len(sent) > _MOST_UNANSWERED:
            raise Unavailable("the retrieval service does not answer")
        yield codec.encode_queries(batch_id, [waiting.query for waiting in batch])


def _settle(batch: Sequence[_Waiting], reply: retrieval_pb2.RetrieveResponse) -> None:
    try:
        if reply.error:
            raise Unavailable(reply.error)
        answers = codec.decode_answers(reply, len(batch))
    except OutriderError as error:
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        return
    for waiting, answer in zip(batch, answers, strict=True):
        # A caller that stopped waiting has cancelled its future.
        if not waiting.answer.done():
            waiting.answer.set_result(answer)


class _RetrievalServicer(retrieval_pb2_grpc.RetrievalServiceServicer):
    def __init__(self, service: LooksUp, guard: Guard) -> None:
        self._service = service
        self._guard = guard

    @override
    async def Retrieve(
        self,
        request_iterator: AsyncIterator[retrieval_pb2.RetrieveRequest],
        context: Context,
    ) -> AsyncIterator[retrieval_pb2.RetrieveResponse]:
        async with self._guard(context):
            async for wire in request_iterator:
                queries = codec.decode_queries(wire)
                try:
                    yield codec.encode_answers(wire.batch_id, self._service.look_up(queries))
                except OutriderError as error:
                    yield retrieval_pb2.RetrieveResponse(batch_id=wire.batch_id, error=str(error))


async def serve_retrieval(
    service: LooksUp,
    address: str,
    token: str | None = None,
    tls: ComponentTls | None = None,
    refused: RefusedComponents | None = None,
    further: Callable[[grpc.aio.Server, Guard], None] = lambda server, guard: None,
) -> tuple[grpc.aio.Server, int]:
    """Start a server for ``service`` at "host:port" (port 0: any free one). Returns it and its port.

    Args:
        token: asked for on every call; None: nothing is asked for.
        tls: the service's files for mutual TLS; None: plain text.
        refused: where refused calls are told; None: the log alone.
        further: adds what else is served at that port, behind the same guard.
    """
    refused = refused or RefusedComponents("retrieval")
    guard = guard_of(tls, refused)

    def add(server: grpc.aio.Server) -> None:
        retrieval_pb2_grpc.add_RetrievalServiceServicer_to_server(_RetrievalServicer(service, guard), server)
        further(server, guard)

    return await serve_internal(add, address, token, tls, refused)
