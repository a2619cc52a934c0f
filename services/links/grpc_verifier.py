"""The link from router to verifier over gRPC: one server-streaming call per generation.

On Ray, Serve's handles take its place. This is for processes without Ray (``outrider bench soak``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.internal.v1 import verification_pb2, verification_pb2_grpc
from outrider.v1 import generation_pb2
from services.access.key_records import hash_key
from services.access.refused_components import RefusedComponents
from services.links.auth import TokenInterceptor, bearer
from services.links.channel import bind, client_options, make_server
from services.links.codec import verification as codec
from services.links.status import DETAIL_KEY, aborting
from speculation import errors, limits
from speculation.errors import InvalidArgument, NotBegun, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, VerifierCard
from speculation.ports import VerifierPort
from speculation.types import Plan

# Metadata that a verifier sends as soon as it has a request, and with the error of one that it will not begin.
_BEGUN, _REFUSED = "outrider-begun", "outrider-not-begun"


class GrpcVerifierLink:
    """Implements ``speculation.ports.VerifierPort`` for the verifier at "host:port".

    Args:
        token: the token that the verifier's server asks for; None: it asks for none.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self._metadata = bearer(token)
        self._channel = grpc.aio.insecure_channel(address, options=client_options(limits.MAX_VERIFY_MESSAGE_BYTES))
        self._stub = verification_pb2_grpc.VerificationServiceStub(self._channel)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        call = self._stub.Verify(codec.encode_generation(request), metadata=self._metadata)
        try:
            async for event in call:
                yield codec.decode_generation_event(event)
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        finally:
            call.cancel()

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        try:
            wanted = codec.encode_comparing(request, plans)
            return codec.decode_comparisons(await self._stub.Compare(wanted, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error

    async def describe(self) -> VerifierCard:
        # A verifier that has just come is not reported as missing while gRPC pauses between its tries to connect.
        try:
            answer = await self._stub.Describe(
                verification_pb2.DescribeRequest(),
                timeout=limits.DESCRIBE_S,
                wait_for_ready=True,
                metadata=self._metadata,
            )
        except grpc.aio.AioRpcError as error:
            raise _late(error, limits.DESCRIBE_S) from error
        return codec.decode_card(answer)

    async def forget(self, tenant: str) -> None:
        try:
            await self._stub.Forget(codec.encode_forget(tenant), timeout=limits.FORGET_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _late(error, limits.FORGET_S) from error

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def _lost(error: grpc.aio.AioRpcError) -> OutriderError:
    """Convert an error of a generation. A verifier that was not reached, or refused, cannot have failed at the request."""
    ours = from_grpc(error)
    begun = any(key == _BEGUN for key, _ in error.initial_metadata() or ())
    refused = any(key == _REFUSED for key, _ in error.trailing_metadata() or ())
    return ours if (begun and not refused) or type(ours) is not Unavailable else NotBegun(str(ours))


_BY_STATUS: dict[str, type[OutriderError]] = {
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "FAILED_PRECONDITION": errors.ConfigurationError,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    # Calls that we cancel raise asyncio.CancelledError; this one met a server in the moment in which it stops.
    "CANCELLED": errors.Unavailable,
}
_WITH_FIELD: dict[str, type[InvalidArgument]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": errors.PromptTooLong,
    "NOT_FOUND": errors.NotFound,
}


def from_grpc(error: grpc.aio.AioRpcError) -> OutriderError:
    """The error that the server raised, rebuilt from its status and trailer."""
    code, message = error.code().name, error.details() or ""
    detail = _read_detail(error)
    if code in _WITH_FIELD and detail.field:
        return _WITH_FIELD[code](detail.field, detail.value, detail.allowed)
    if code == "RESOURCE_EXHAUSTED":
        return ResourceExhausted(message, detail.retry_after_s or 1.0)
    return _BY_STATUS.get(code, errors.Internal)(message)


def _read_detail(error: grpc.aio.AioRpcError) -> generation_pb2.ErrorDetail:
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return generation_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                pass
    return generation_pb2.ErrorDetail()


def _late(error: grpc.aio.AioRpcError, deadline_s: float) -> OutriderError:
    """Convert an error. Missing our deadline is ``Unavailable``: another verifier, or this one later, may answer."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"the verifier has not answered for {deadline_s:g} s; try again")
    return from_grpc(error)


class _VerificationServicer(verification_pb2_grpc.VerificationServiceServicer):
    def __init__(self, verifier: VerifierPort) -> None:
        self._verifier = verifier

    async def Verify(
        self, request: verification_pb2.VerifyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[verification_pb2.VerifyResponse]:
        async with aborting(context):
            await context.send_initial_metadata(((_BEGUN, "1"),))
            events = self._verifier.generate(codec.decode_generation(request))
            try:
                async for event in events:
                    yield codec.encode_generation_event(event)
            except NotBegun as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), ((_REFUSED, "1"),))
            finally:
                await events.aclose()

    async def Compare(
        self, request: verification_pb2.CompareRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verification_pb2.CompareResponse:
        async with aborting(context):
            return codec.encode_comparisons(await self._verifier.compare(*codec.decode_comparing(request)))

    async def Describe(
        self, request: verification_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verification_pb2.DescribeResponse:
        async with aborting(context):
            return codec.encode_card(await self._verifier.describe())

    async def Forget(
        self, request: verification_pb2.ForgetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verification_pb2.ForgetResponse:
        async with aborting(context):
            await self._verifier.forget(codec.decode_forget(request))
            return verification_pb2.ForgetResponse()


async def serve_verifier(verifier: VerifierPort, address: str, token: str | None = None) -> tuple[grpc.aio.Server, int]:
    """Start a server for ``verifier`` at "host:port" (port 0: any free one). Returns it and its port.

    Args:
        token: asked for on every call; None: nothing is asked for.
    """
    guards = [TokenInterceptor(hash_key(token), RefusedComponents("verifier"))] if token else []
    server = make_server(limits.MAX_VERIFY_MESSAGE_BYTES, interceptors=guards)
    verification_pb2_grpc.add_VerificationServiceServicer_to_server(_VerificationServicer(verifier), server)
    port = bind(server, address)
    await server.start()
    return server, port
