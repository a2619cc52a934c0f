"""Kept answers over gRPC: calls of drafters to the retrieval service, on the connection of their queries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc.aio
from typing_extensions import override

from outrider.internal.v1 import answers_pb2, answers_pb2_grpc
from services.links.auth import bearer
from services.links.codec import answers as codec
from services.links.codec.checks import check_size
from services.links.grpc_retrieval import GrpcRetrievalLink
from services.links.grpc_verifier import from_grpc
from services.links.guarded_calls import Guard
from services.links.status import Context
from speculation import limits
from speculation.errors import Unavailable
from speculation.messages import RecalledAnswers
from speculation.ports import AnswerStore

_Reply = TypeVar("_Reply")

# Seconds of a call.
_WITHIN_S = 2.0


class GrpcAnswersLink:
    """Implements ``speculation.ports.AnswerStore``.

    Args:
        retrieval: whose connection is used.
        token: the token that the server asks for; None: it asks for none.
    """

    def __init__(self, retrieval: GrpcRetrievalLink, token: str | None = None) -> None:
        self._retrieval = retrieval
        self._metadata = bearer(token)

    async def recall(self, tenant: str, after: str, drafter: str) -> RecalledAnswers:
        wire = answers_pb2.RecallRequest(tenant=tenant, after=after, drafter=drafter)
        return codec.decode_recalled(await _answered(self._stub().Recall(wire, **self._call())))

    async def keep(self, tenant: str, generation: int, drafter: str, tokens: Sequence[int]) -> bool:
        answer = answers_pb2.KeptAnswer(tokens=tokens[-limits.MAX_KEPT_ANSWER :])
        wire = answers_pb2.KeepRequest(tenant=tenant, generation=generation, drafter=drafter, answer=answer)
        kept: bool = (await _answered(self._stub().Keep(wire, **self._call()))).kept
        return kept

    async def forget(self, tenant: str) -> None:
        wire = answers_pb2.ForgetAnswersRequest(tenant=tenant)
        await _answered(self._stub().ForgetAnswers(wire, **self._call()))

    def _stub(self) -> Any:
        channel = self._retrieval.channel
        if channel is None:
            raise Unavailable("the retrieval service is not there")
        return answers_pb2_grpc.AnswersServiceStub(channel)

    def _call(self) -> dict[str, Any]:
        return {"timeout": _WITHIN_S, "metadata": self._metadata}


async def _answered(call: Awaitable[_Reply]) -> _Reply:
    """The reply of a call.

    Raises:
        OutriderError: the server's error, or ``Unavailable`` where the connection ends.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Unavailable(f"the retrieval service has not answered for {_WITHIN_S:g} s") from error
        raise from_grpc(error) from error
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls. Pass on only what cancels this task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("the retrieval service went away") from None


class _AnswersServicer(answers_pb2_grpc.AnswersServiceServicer):
    def __init__(self, store: AnswerStore, guard: Guard) -> None:
        self._store = store
        self._guard = guard

    @override
    async def Recall(self, request: answers_pb2.RecallRequest, context: Context) -> answers_pb2.RecallResponse:
        async with self._guard(context):
            check_size("drafter", len(request.drafter), limits.MAX_SOURCE_NAME)
            return codec.encode_recalled(await self._store.recall(request.tenant, request.after, request.drafter))

    @override
    async def Keep(self, request: answers_pb2.KeepRequest, context: Context) -> answers_pb2.KeepResponse:
        async with self._guard(context):
            check_size("drafter", len(request.drafter), limits.MAX_SOURCE_NAME)
            tokens = codec.checked_answer(request.answer.tokens)
            return answers_pb2.KeepResponse(
                kept=await self._store.keep(request.tenant, request.generation, request.drafter, tokens)
            )

    @override
    async def ForgetAnswers(
        self, request: answers_pb2.ForgetAnswersRequest, context: Context
    ) -> answers_pb2.ForgetAnswersResponse:
        async with self._guard(context):
            await self._store.forget(request.tenant)
            return answers_pb2.ForgetAnswersResponse()


def serves(store: AnswerStore | None) -> Callable[[grpc.aio.Server, Guard], None]:
    """``further`` of ``serve_retrieval``: serves the store, if there is one."""

    def add(server: grpc.aio.Server, guard: Guard) -> None:
        if store is not None:
            answers_pb2_grpc.add_AnswersServiceServicer_to_server(_AnswersServicer(store, guard), server)

    return add
