"""Links within one process. They carry the same messages as over gRPC: all pass through the codec.

Only hidden states, which are large, are passed by reference, as bytes or where they are held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from typing_extensions import override

from outrider.internal.v1 import drafting_pb2, retrieval_pb2
from services.links import serialised
from services.links.call_queue import CallQueue, QueuedCall, SentCalls
from services.links.codec import drafting as codec
from services.links.codec import retrieval as retrieval_codec
from services.links.codec.features import detach_data, features_of
from services.links.draft_server import converse, encode_replies
from services.links.handing_over import hand_over
from services.links.open_sessions import SILENCE_S
from speculation.adapters import AdapterOrder
from speculation.columns import ReportColumns, SentReports
from speculation.errors import Unavailable
from speculation.messages import (
    DraftingCall,
    Finished,
    GenerationRequest,
    Progress,
    ReplayedAnswer,
    RetrievalQuery,
    Retrieved,
    ServiceState,
    VerifierCard,
)
from speculation.ports import Drafter, DraftReceiver, Retriever, VerifierPort
from speculation.reloads import ReloadOrder
from speculation.types import Plan

log = logging.getLogger(__name__)

# Seconds before failed drafting is restarted.
_PAUSE_S = 0.1


class InProcessDraftLink(SentCalls):
    """Implements ``speculation.ports.DraftLink`` for a drafter in the same event loop.

    When drafting fails or falls too far behind, the conversation is restarted, as after a broken stream.

    Args:
        silence_s: seconds without a call after which a session is closed.
    """

    def __init__(self, drafter: Drafter, silence_s: float = SILENCE_S) -> None:
        self._drafter = drafter
        self._silence_s = silence_s
        self._calls: CallQueue | None = None
        # Calls of this turn of the event loop, which are handed over together.
        self._unsent: list[DraftingCall | SentReports] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._calls is not None

    async def start(self, receiver: DraftReceiver) -> None:
        self._calls = CallQueue()
        receiver.on_connected()
        self._task = asyncio.create_task(self._pump(receiver, self._calls), name="in-process-drafts")

    @override
    def steps(self, reports: SentReports) -> None:
        self._send(reports)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._calls = None

    @override
    def _send(self, call: DraftingCall | SentReports) -> None:
        # As over gRPC, a call is dropped while disconnected: on_connected tells the drafter everything later.
        if self._calls is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._unsent.append(call)

    def _hand_over(self) -> None:
        calls, self._unsent, unsent = self._calls, [], self._unsent
        if calls is None:
            return
        try:
            if all(calls.push(call) for call in _through_codec(unsent)):
                return
            log.warning("the drafter does not keep up with its calls; restarting it")
        except Exception:
            log.exception("a message to the drafter is lost; restarting it")
        self._calls = None
        calls.abandon()

    async def _pump(self, receiver: DraftReceiver, calls: CallQueue) -> None:
        while True:
            try:
                async with aclosing(converse(self._drafter, calls, self._silence_s)) as replies:
                    async for ready in replies:
                        for wire in encode_replies(ready):
                            hand_over(drafting_pb2.DraftResponse.FromString(wire.SerializeToString()), receiver)
            except Exception:
                log.exception("drafting in this process failed; restarting it")
            self._calls = None
            await asyncio.sleep(_PAUSE_S)
            self._calls, self._unsent = CallQueue(), []
            calls = self._calls
            try:
                receiver.on_connected()
            except Exception:
                log.exception("drafting in this process cannot restart; trying again")
                calls.abandon()


def _through_codec(calls: Sequence[DraftingCall | SentReports]) -> Iterator[QueuedCall]:
    for carries, group in itertools.groupby(calls, lambda call: features_of(call) is not None):
        if carries:
            yield from [_with_data(call) for call in group if not isinstance(call, SentReports)]
            continue
        for wire in codec.encode_drafting_calls(list(group)):
            read = codec.decode_together(drafting_pb2.DraftRequest.FromString(wire.SerializeToString()))
            if isinstance(read, ReportColumns):
                yield read
            else:
                yield from read


def _with_data(call: DraftingCall) -> DraftingCall:
    bare, data = detach_data(call)
    wire = codec.encode_drafting_call(bare).SerializeToString()
    return codec.decode_drafting_call(drafting_pb2.DraftRequest.FromString(wire), data)


class InProcessRetrievalLink:
    """Implements ``speculation.ports.Retriever`` for a retrieval service in the same event loop."""

    def __init__(self, service: Retriever) -> None:
        self._service = service

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        wire = retrieval_codec.encode_queries(0, [query]).SerializeToString()
        (received,) = retrieval_codec.decode_queries(retrieval_pb2.RetrieveRequest.FromString(wire))
        answer = await self._service.retrieve(received)
        wire = retrieval_codec.encode_answers(0, [answer]).SerializeToString()
        return retrieval_codec.decode_answers(retrieval_pb2.RetrieveResponse.FromString(wire), 1)[0]


class InProcessVerifierLink:
    """Implements ``speculation.ports.VerifierLink`` for a verifier in the same event loop."""

    def __init__(self, verifier: VerifierPort) -> None:
        self._verifier = verifier

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        events = self._verifier.generate(serialised.REQUEST.read(serialised.REQUEST.write(request)))
        try:
            async for event in events:
                yield await serialised.read_event(await serialised.write_event(event))
        finally:
            await events.aclose()

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        received = serialised.COMPARING.read(serialised.COMPARING.write((request, plans)))
        return serialised.COMPARISONS.read(serialised.COMPARISONS.write(await self._verifier.compare(*received)))

    async def forget(self, tenant: str) -> None:
        await self._verifier.forget(serialised.FORGET.read(serialised.FORGET.write(tenant)))

    async def adapt(self, order: AdapterOrder) -> str:
        return await self._verifier.adapt(serialised.ADAPTING.read(serialised.ADAPTING.write(order)))

    async def reload(self, order: ReloadOrder) -> str:
        return await self._verifier.reload(serialised.RELOAD.read(serialised.RELOAD.write(order)))

    async def describe(self) -> VerifierCard:
        return serialised.CARD.read(serialised.CARD.write(await self._verifier.describe()))

    async def service_state(self) -> ServiceState:
        try:
            cards = (await self.describe(),)
        except Unavailable:
            return ServiceState(components={"verifier": {"not answering": 1}})
        return ServiceState(verifiers=cards, components={"verifier": {"running": 1}})
