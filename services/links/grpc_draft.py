"""The draft link over gRPC: one stream per verifier-drafter pair carries every session."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from typing_extensions import override

from outrider.internal.v1 import drafting_pb2, drafting_pb2_grpc
from services.access.refused_components import RefusedComponents
from services.links.auth import bearer
from services.links.call_queue import END, CallQueue, SentCalls
from services.links.codec import drafting as codec
from services.links.codec.features import features_of, in_messages
from services.links.codec.held_models import decode_drafter, encode_drafter
from services.links.draft_forms import COLUMNS, READ_HERE, reads
from services.links.draft_server import converse, encode_replies
from services.links.guarded_calls import Guard
from services.links.handing_over import hand_over
from services.links.internal import guard_of, serve_internal
from services.links.open_sessions import SILENCE_S
from services.links.reconnect import stay_connected
from services.links.status import Context
from services.links.tls.component_files import ComponentTls
from services.links.tls.mutual import CallerTls
from speculation import limits
from speculation.columns import DraftColumns, ReportColumns
from speculation.errors import InvalidArgument
from speculation.held_models import DrafterCard
from speculation.messages import (
    DraftingCall,
    DraftingReply,
    ForgetTenant,
    Forgotten,
)
from speculation.ports import Drafter, DraftReceiver

log = logging.getLogger(__name__)


class GrpcDraftLink(SentCalls):
    """Implements ``speculation.ports.DraftLink`` and ``DescribedDrafts``.

    Reconnects for ever; while disconnected, it drops what it is told to send.

    Attributes:
        card: what the drafter has told of itself when it was connected last; None: nothing.

    Args:
        resolve: gives the drafter's "host:port" before every attempt, so that a restarted drafter is found.
        token: the token that the drafter's server asks for; None: it asks for none.
        tls: credentials for mutual TLS; None: plain text.
        elsewhere: the drafter has settings of its own, and is asked at each connection what it holds.
    """

    def __init__(
        self,
        resolve: Callable[[], Awaitable[str]],
        token: str | None = None,
        tls: CallerTls | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        self._resolve = resolve
        self._elsewhere = elsewhere
        self._tls = tls
        self._metadata = bearer(token)
        self._talking: Any = None
        self._calls: CallQueue | None = None
        self._task: asyncio.Task[None] | None = None
        self.card: DrafterCard | None = None

    @property
    def connected(self) -> bool:
        return self._calls is not None

    async def start(self, receiver: DraftReceiver) -> None:

        async def talk(channel: grpc.aio.Channel) -> None:
            await self._talk(channel, receiver)

        connecting = stay_connected("drafter", self._resolve, limits.MAX_DRAFT_MESSAGE_BYTES, talk, self._tls)
        self._task = asyncio.create_task(connecting, name="grpc-drafts")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def reconnect(self) -> None:
        """Give up the connection, and make one to the address that ``resolve`` gives now."""
        if self._calls is not None:
            self._calls = None
            self._talking.cancel()

    @override
    def _send(self, call: DraftingCall) -> None:
        # Without a connection the call is dropped: on_connected tells a drafter that returns everything.
        if self._calls is not None and not self._calls.push(call):
            log.warning("the drafter does not keep up with its calls; reconnecting")
            self.reconnect()

    async def _talk(self, channel: grpc.aio.Channel, receiver: DraftReceiver) -> None:
        calls, peer, drafter = CallQueue(), _Peer(), drafting_pb2_grpc.DraftingServiceStub(channel)
        self.card = await _described(drafter, self._metadata) if self._elsewhere else None
        replies = drafter.Draft(_requests(calls, peer), metadata=(*self._metadata, *READ_HERE))
        self._calls, self._talking = calls, replies
        try:
            receiver.on_connected()
            async for wire in replies:
                # It has come with the first reply.
                peer.columns = peer.columns or reads(await replies.initial_metadata(), COLUMNS)
                hand_over(wire, receiver)
        finally:
            self._calls = None
            # gRPC goes on reading requests of a broken stream.
            calls.abandon()
            replies.cancel()


async def _described(
    drafter: drafting_pb2_grpc.DraftingServiceAsyncStub, metadata: tuple[tuple[str, str], ...]
) -> DrafterCard | None:
    """What a drafter tells of itself; None: nothing that can be used.

    Raises:
        AioRpcError: it does not answer, or refuses the call.
    """
    asked = drafting_pb2.DraftingServiceDescribeRequest()
    try:
        card = decode_drafter(await drafter.Describe(asked, timeout=limits.DESCRIBE_S, metadata=metadata))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return None
    except InvalidArgument as error:
        log.warning("what the drafter tells of itself is not used: %s", error)
        return None
    names = ", ".join(model.called for model in card.held) or "no models"
    log.info("the drafter is Outrider %s for %s, and holds %s", card.version, card.target, names)
    return card


class _Peer:
    """What is known of a drafter: ``columns``: it reads them. Until it has said so, it is sent what every version reads."""

    columns = False


async def _requests(calls: CallQueue, peer: _Peer) -> AsyncIterator[drafting_pb2.DraftRequest]:
    while (call := await calls.get()) is not END:
        ready = list(in_messages(call))
        # Hidden states stay in the queue, which bounds them, until their turn comes.
        while features_of(call) is None and (more := calls.get_nowait()) is not END:
            call = more
            ready += in_messages(call)
        for wire in codec.encode_drafting_calls(ready, columns=peer.columns):
            yield wire


class _DraftingServicer(drafting_pb2_grpc.DraftingServiceServicer):
    def __init__(self, drafter: Drafter, silence_s: float, guard: Guard, card: DrafterCard | None = None) -> None:
        self._drafter = drafter
        self._card = card
        self._silence_s = silence_s
        self._guard = guard
        self._streams = itertools.count()

    @override
    async def Describe(
        self, request: drafting_pb2.DraftingServiceDescribeRequest, context: Context
    ) -> drafting_pb2.DraftingServiceDescribeResponse:
        async with self._guard(context):
            if self._card is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this drafter holds what the settings of its service say")
            return encode_drafter(self._card)

    @override
    async def Draft(
        self,
        request_iterator: AsyncIterator[drafting_pb2.DraftRequest],
        context: Context,
    ) -> AsyncIterator[drafting_pb2.DraftResponse]:
        # Two verifiers may use one request id (a request that moved), so each stream gets a prefix of its own.
        async with self._guard(context):
            await context.send_initial_metadata(READ_HERE)
            columns = reads(context.invocation_metadata(), COLUMNS)
            prefix = f"{next(self._streams)}/"
            calls = CallQueue()
            reading = asyncio.create_task(_read(request_iterator, prefix, calls))
            try:
                async with aclosing(converse(self._drafter, calls, self._silence_s)) as replies:
                    async for ready in replies:
                        for wire in encode_replies([_without(prefix, reply) for reply in ready], columns=columns):
                            yield wire
                    await reading
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


def _without(prefix: str, reply: DraftingReply | DraftColumns) -> DraftingReply | DraftColumns:
    if isinstance(reply, DraftColumns):
        return replace(reply, session_ids=[name.removeprefix(prefix) for name in reply.session_ids])
    return reply if isinstance(reply, Forgotten) else replace(reply, session_id=reply.session_id.removeprefix(prefix))


async def _read(requests: AsyncIterator[drafting_pb2.DraftRequest], prefix: str, calls: CallQueue) -> None:
    """Put a stream's calls into a queue, then end the queue. A full queue makes the sender wait."""
    try:
        async for wire in requests:
            read = codec.decode_together(wire)
            if isinstance(read, ReportColumns):
                await calls.put(replace(read, session_ids=[prefix + name for name in read.session_ids]))
                continue
            for call in read:
                named = call if isinstance(call, ForgetTenant) else replace(call, session_id=prefix + call.session_id)
                await calls.put(named)
    finally:
        calls.end()


async def serve_drafter(
    drafter: Drafter,
    address: str,
    token: str | None = None,
    silence_s: float = SILENCE_S,
    tls: ComponentTls | None = None,
    refused: RefusedComponents | None = None,
    card: DrafterCard | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Start a server for ``drafter`` at "host:port" (port 0: any free one). Returns it and its port.

    Args:
        token: asked for on every call; None: nothing is asked for.
        silence_s: seconds without a call after which a session is closed.
        tls: the drafter's files for mutual TLS; None: plain text.
        refused: where refused calls are told; None: the log alone.
        card: what the drafter tells of itself; None: nothing, since it has the settings of those that call.
    """
    refused = refused or RefusedComponents("drafter")
    servicer = _DraftingServicer(drafter, silence_s, guard_of(tls, refused), card)
    return await serve_internal(
        lambda server: drafting_pb2_grpc.add_DraftingServiceServicer_to_server(servicer, server),
        address,
        token,
        tls,
        refused,
    )
