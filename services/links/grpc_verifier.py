"""The link from router to verifier over gRPC: one server-streaming call per generation.

On Ray, Serve's handles take its place. This is for verifiers outside of Ray (``router.verifiers``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from typing_extensions import override

from outrider.internal.v1 import verification_pb2, verification_pb2_grpc
from outrider.v1 import generation_pb2
from services.access.refused_components import RefusedComponents
from services.links.auth import bearer
from services.links.channel import client_options
from services.links.codec import verification as codec
from services.links.guarded_calls import Guard
from services.links.internal import guard_of, serve_internal
from services.links.status import DETAIL_KEY, Context
from services.links.tls.component_files import ComponentTls
from services.links.tls.mutual import CallerTls
from speculation import errors, limits
from speculation.adapters import AdapterOrder
from speculation.errors import InvalidArgument, NotBegun, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, VerifierCard
from speculation.ports import VerifierPort
from speculation.reloads import ReloadOrder
from speculation.types import Plan

# Metadata that a verifier sends as soon as it has a request, and with the error of one that it will not begin.
_BEGUN, _REFUSED = "outrider-begun", "outrider-not-begun"


class _Connection:
    """A channel to a verifier, which lives as long as it is referred to: calls under way outlive a newer one."""

    def __init__(self, address: str, tls: CallerTls | None) -> None:
        options = client_options(limits.MAX_VERIFY_MESSAGE_BYTES)
        insecure = grpc.aio.insecure_channel
        self.channel = insecure(address, options=options) if tls is None else tls.channel(address, options)
        self.stub = verification_pb2_grpc.VerificationServiceStub(self.channel)


class GrpcVerifierLink:
    """Implements ``speculation.ports.VerifierPort`` for the verifier at "host:port".

    Args:
        token: the token that the verifier's server asks for; None: it asks for none.
        tls: the router's credentials; None: plain text.
    """

    def __init__(self, address: str, token: str | None = None, tls: CallerTls | None = None) -> None:
        self._address = address
        self._metadata = bearer(token)
        self._tls = tls
        self._connection = _Connection(address, tls)
        self._following: asyncio.Task[None] | None = None

    def _connected(self) -> _Connection:
        """The present connection; with the first call, the certificate begins to be followed."""
        if self._tls is not None and self._following is None:
            self._following = asyncio.create_task(self._follow(self._tls), name="renewed-certificate")
        return self._connection

    async def _follow(self, tls: CallerTls) -> None:
        while True:
            await tls.renewed()
            self._connection = _Connection(self._address, tls)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        connection = self._connected()
        call = connection.stub.Verify(codec.encode_generation(request), metadata=self._metadata)
        try:
            async for event in call:
                yield await codec.decode_event_in_turns(event)
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        finally:
            call.cancel()

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        try:
            wanted = codec.encode_comparing(request, plans)
            return codec.decode_comparisons(await self._connected().stub.Compare(wanted, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error

    async def describe(self) -> VerifierCard:
        # A verifier that has just come is not reported as missing while gRPC pauses between its tries to connect.
        try:
            answer = await self._connected().stub.Describe(
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
            await self._connected().stub.Forget(
                codec.encode_forget(tenant), timeout=limits.FORGET_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _late(error, limits.FORGET_S) from error

    async def adapt(self, order: AdapterOrder) -> str:
        within_s = order.within_s + limits.ADAPT_S
        try:
            answer = await self._connected().stub.Adapt(
                codec.encode_adapting(order), timeout=within_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _late(error, within_s) from error
        return codec.decode_adapted(answer)

    async def reload(self, order: ReloadOrder) -> str:
        try:
            answer = await self._connected().stub.Reload(
                codec.encode_reload(order), timeout=order.patience_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _late(error, order.patience_s) from error
        return codec.decode_reloaded(answer)

    async def close(self) -> None:
        """Close the channel."""
        if self._following is not None:
            self._following.cancel()
        await self._connection.channel.close()


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
    def __init__(self, verifier: VerifierPort, guard: Guard) -> None:
        self._verifier = verifier
        self._guard = guard

    @override
    async def Verify(
        self, request: verification_pb2.VerifyRequest, context: Context
    ) -> AsyncIterator[verification_pb2.VerifyResponse]:
        async with self._guard(context):
            await context.send_initial_metadata(((_BEGUN, "1"),))
            events = self._verifier.generate(codec.decode_generation(request))
            try:
                async for event in events:
                    yield await codec.encode_event_in_turns(event)
            except NotBegun as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), ((_REFUSED, "1"),))
            finally:
                await events.aclose()

    @override
    async def Compare(self, request: verification_pb2.CompareRequest, context: Context) -> verification_pb2.CompareResponse:
        async with self._guard(context):
            return codec.encode_comparisons(await self._verifier.compare(*codec.decode_comparing(request)))

    @override
    async def Describe(
        self, request: verification_pb2.DescribeRequest, context: Context
    ) -> verification_pb2.DescribeResponse:
        async with self._guard(context):
            return codec.encode_card(await self._verifier.describe())

    @override
    async def Forget(self, request: verification_pb2.ForgetRequest, context: Context) -> verification_pb2.ForgetResponse:
        async with self._guard(context):
            await self._verifier.forget(codec.decode_forget(request))
            return verification_pb2.ForgetResponse()

    @override
    async def Adapt(self, request: verification_pb2.AdaptRequest, context: Context) -> verification_pb2.AdaptResponse:
        async with self._guard(context):
            return codec.encode_adapted(await self._verifier.adapt(codec.decode_adapting(request)))

    @override
    async def Reload(self, request: verification_pb2.ReloadRequest, context: Context) -> verification_pb2.ReloadResponse:
        async with self._guard(context):
            return codec.encode_reloaded(await self._verifier.reload(codec.decode_reload(request)))


async def serve_verifier(
    verifier: VerifierPort,
    address: str,
    token: str | None = None,
    tls: ComponentTls | None = None,
    refused: RefusedComponents | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Start a server for ``verifier`` at "host:port" (port 0: any free one). Returns it and its port.

    Args:
        token: asked for on every call; None: nothing is asked for.
        tls: the verifier's files for mutual TLS; None: plain text.
        refused: where refused calls are told; None: the log alone.
    """
    refused = refused or RefusedComponents("verifier")
    servicer = _VerificationServicer(verifier, guard_of(tls, refused))
    return await serve_internal(
        lambda server: verification_pb2_grpc.add_VerificationServiceServicer_to_server(servicer, server),
        address,
        token,
        tls,
        refused,
        limits.MAX_VERIFY_MESSAGE_BYTES,
    )
