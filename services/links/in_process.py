"""Links within one process. The same bytes as over gRPC: every message passes through the codec."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from outrider.internal.v1 import drafting_pb2, retrieval_pb2, verification_pb2
from services.links.codec import drafting as codec
from services.links.codec import retrieval as retrieval_codec
from services.links.codec import verification as verification_codec
from services.links.draft_server import converse
from speculation.messages import (
    CloseSession,
    DraftingCall,
    FeatureChunk,
    Finished,
    ForgetTenant,
    GenerationRequest,
    OpenSession,
    Progress,
    RetrievalQuery,
    Retrieved,
    StepReport,
    VerifierCard,
)
from speculation.ports import Drafter, DraftReceiver, Retriever, VerifierPort


class InProcessDraftLink:
    """Implements ``speculation.ports.DraftLink`` on a drafter in the same event loop."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._calls: asyncio.Queue[DraftingCall | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """See ``DraftLink``."""
        return self._task is not None and not self._task.done()

    async def start(self, receiver: DraftReceiver) -> None:
        """See ``DraftLink``."""
        self._task = asyncio.create_task(self._pump(receiver), name="in-process-drafts")
        receiver.on_connected()

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
            self._task = None

    def _send(self, call: DraftingCall) -> None:
        wire = codec.encode_drafting_call(call).SerializeToString()
        self._calls.put_nowait(codec.decode_drafting_call(drafting_pb2.DraftRequest.FromString(wire)))

    async def _pump(self, receiver: DraftReceiver) -> None:
        async for reply in converse(self._drafter, self._calls):
            wire = codec.encode_drafting_reply(reply).SerializeToString()
            receiver.on_reply(codec.decode_drafting_reply(drafting_pb2.DraftResponse.FromString(wire)))


class InProcessRetrievalLink:
    """Implements ``speculation.ports.Retriever`` on a retrieval service in the same event loop."""

    def __init__(self, service: Retriever) -> None:
        self._service = service

    async def retrieve(self, query: RetrievalQuery) -> Retrieved:
        """See ``Retriever``."""
        wire = retrieval_codec.encode_queries(0, [query]).SerializeToString()
        (received,) = retrieval_codec.decode_queries(retrieval_pb2.RetrieveRequest.FromString(wire))
        answer = await self._service.retrieve(received)
        wire = retrieval_codec.encode_answers(0, [answer]).SerializeToString()
        return retrieval_codec.decode_answers(retrieval_pb2.RetrieveResponse.FromString(wire), 1)[0]


class InProcessVerifierLink:
    """Implements ``speculation.ports.VerifierPort`` on a verifier in the same event loop."""

    def __init__(self, verifier: VerifierPort) -> None:
        self._verifier = verifier

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """See ``VerifierPort``."""
        wire = verification_codec.encode_generation(request).SerializeToString()
        received = verification_codec.decode_generation(verification_pb2.VerifyRequest.FromString(wire))
        events = self._verifier.generate(received)
        try:
            async for event in events:
                sent = verification_codec.encode_generation_event(event).SerializeToString()
                yield verification_codec.decode_generation_event(verification_pb2.VerifyResponse.FromString(sent))
        finally:
            await events.aclose()

    async def forget(self, tenant: str) -> None:
        """See ``VerifierPort``."""
        wire = verification_codec.encode_forget(tenant).SerializeToString()
        await self._verifier.forget(verification_codec.decode_forget(verification_pb2.ForgetRequest.FromString(wire)))

    async def describe(self) -> VerifierCard:
        """See ``VerifierPort``."""
        wire = verification_codec.encode_card(await self._verifier.describe()).SerializeToString()
        return verification_codec.decode_card(verification_pb2.DescribeResponse.FromString(wire))
