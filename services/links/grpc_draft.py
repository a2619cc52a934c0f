"""The draft link over gRPC: one stream per verifier-drafter pair carries every session."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from outrider.internal.v1 import drafting_pb2, drafting_pb2_grpc
from services.links.auth import bearer
from services.links.codec import drafting as codec
from services.links.draft_server import END, converse
from services.links.internal import serve_internal
from services.links.reconnect import stay_connected
from services.links.status import aborting
from speculation import limits
from speculation.messages import CloseSession, DraftingCall, FeatureChunk, ForgetTenant, Forgotten, OpenSession, StepReport
from speculation.ports import Drafter, DraftReceiver

log = logging.getLogger(__name__)

_OUTBOX = 4096


class GrpcDraftLink:
    """Implements ``speculation.ports.DraftLink``. Reconnects for ever; meanwhile there is no drafter, and nobody waits.

    Args:
        resolve: gives the drafter's "host:port" anew before every attempt, so that a restarted one is found.
        token: what the drafter's server asks for; None: it asks for nothing.
    """

    def __init__(self, resolve: Callable[[], Awaitable[str]], token: str | None = None) -> None:
        self._resolve = resolve
        self._metadata = bearer(token)
        self._talking: Any = None
        self._outbox: asyncio.Queue[drafting_pb2.DraftRequest] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """See ``DraftLink``."""
        return self._outbox is not None

    async def start(self, receiver: DraftReceiver) -> None:
        """See ``DraftLink``."""

        async def talk(channel: grpc.aio.Channel) -> None:
            await self._talk(channel, receiver)

        connecting = stay_connected("drafter", self._resolve, limits.MAX_DRAFT_MESSAGE_BYTES, talk)
        self._task = asyncio.create_task(connecting, name="grpc-drafts")

    def open(self, message: OpenSession) -> None:
        """See ``DraftLink``."""
        self._send(message)

    def step(self, message: StepReport) -> None:
        """See ``DraftLink``."""
        self._send(message)

    def features(self, message: FeatureChunk) -> None:
        """See ``DraftLink``."""
        self._send(message)

    def close(self, message: CloseSession) -> None:
        """See ``DraftLink``."""
        self._send(message)

    def forget(self, message: ForgetTenant) -> None:
        """See ``DraftLink``."""
        self._send(message)

    async def stop(self) -> None:
        """See ``DraftLink``."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _send(self, call: DraftingCall) -> None:
        # Without a connection there is nobody to tell: a drafter that comes back is told everything by on_connected.
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(codec.encode_drafting_call(call))
        except asyncio.QueueFull:
            log.warning("the drafter does not read what it is sent; connecting anew")
            self._outbox = None
            self._talking.cancel()

    async def _talk(self, channel: grpc.aio.Channel, receiver: DraftReceiver) -> None:
        outbox: asyncio.Queue[drafting_pb2.DraftRequest] = asyncio.Queue(_OUTBOX)

        async def requests() -> AsyncIterator[drafting_pb2.DraftRequest]:
            while True:
                yield await outbox.get()

        replies = drafting_pb2_grpc.DraftingServiceStub(channel).Draft(requests(), metadata=self._metadata)
        self._outbox, self._talking = outbox, replies
        try:
            receiver.on_connected()
            async for reply in replies:
                receiver.on_reply(codec.decode_drafting_reply(reply))
        finally:
            self._outbox = None
            replies.cancel()


class _DraftingServicer(drafting_pb2_grpc.DraftingServiceServicer):
    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._streams = itertools.count()

    async def Draft(
        self,
        request_iterator: AsyncIterator[drafting_pb2.DraftRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[drafting_pb2.DraftResponse]:
        # Two verifiers may use one request id (a request that moved): sessions are kept apart by stream.
        prefix = f"{next(self._streams)}/"
        opened: set[str] = set()
        calls: asyncio.Queue[DraftingCall | None] = asyncio.Queue(_OUTBOX)
        reading = asyncio.create_task(_read(request_iterator, prefix, opened, calls))
        try:
            async with aborting(context):
                async for reply in converse(self._drafter, calls):
                    if not isinstance(reply, Forgotten):
                        reply = replace(reply, session_id=reply.session_id.removeprefix(prefix))
                    yield codec.encode_drafting_reply(reply)
                await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            # A stream that is cancelled may leave in the queue what must not be lost.
            while not calls.empty():
                match calls.get_nowait():
                    case CloseSession() as left:
                        self._drafter.close(left)
                    case ForgetTenant() as left:
                        self._drafter.forget(left)
            for session_id in opened:
                self._drafter.close(CloseSession(session_id=session_id))


async def _read(
    requests: AsyncIterator[drafting_pb2.DraftRequest],
    prefix: str,
    opened: set[str],
    calls: asyncio.Queue[DraftingCall | None],
) -> None:
    """Put a stream's calls into a queue, and its end."""
    try:
        async for wire in requests:
            call = codec.decode_drafting_call(wire)
            if isinstance(call, ForgetTenant):
                await calls.put(call)
                continue
            inner = replace(call, session_id=prefix + call.session_id)
            if isinstance(call, CloseSession):
                opened.discard(inner.session_id)
            elif not isinstance(call, FeatureChunk):
                opened.add(inner.session_id)
            await calls.put(inner)
    except Exception:
        await calls.put(END)
        raise
    await calls.put(END)


async def serve_drafter(drafter: Drafter, address: str, token: str | None = None) -> tuple[grpc.aio.Server, int]:
    """Start a server for ``drafter`` at "host:port" (port 0: any) that asks for ``token``; returns it and its port."""
    return await serve_internal(
        lambda server: drafting_pb2_grpc.add_DraftingServiceServicer_to_server(_DraftingServicer(drafter), server),
        address,
        token,
    )
