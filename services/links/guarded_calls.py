"""Guards around the methods of a gRPC server: what a call must pass before its method sees it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from typing_extensions import override

from services.links.status import Context, aborting
from speculation.errors import InvalidArgument

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Guard: TypeAlias = "Callable[[Context], AbstractAsyncContextManager[None]]"
Next: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class WholeMessages(grpc.aio.ServerInterceptor):
    """Answers messages that cannot be decoded with INVALID_ARGUMENT; gRPC alone says UNKNOWN, and logs a traceback each."""

    @override
    async def intercept_service(self, continuation: Next, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        return _decoding(handler, handler.request_deserializer)


class _Undecodable:
    """Stands for a message that could not be decoded."""

    def __init__(self, size: int) -> None:
        self.size = size


def _checked(message: Any) -> Any:
    if isinstance(message, _Undecodable):
        raise InvalidArgument("request", f"{message.size} bytes", "a message of the type that the method takes")
    return message


def _decoding(handler: Handler, decode: Callable[[bytes], Any]) -> Handler:
    def lenient(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception:
            return _Undecodable(len(data))

    async def whole(messages: Any) -> AsyncIterator[Any]:
        async for message in messages:
            yield _checked(message)

    return wrapped(handler, _nothing, whole if handler.request_streaming else _checked, lenient)


@asynccontextmanager
async def _nothing(_context: Context) -> AsyncIterator[None]:
    yield


def wrapped(handler: Handler, guard: Guard, read: Callable[[Any], Any], decode: Callable[[bytes], Any] | None) -> Handler:
    """A handler of the same kind that runs within ``guard``, on what ``read`` makes of its request."""
    method: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def answer(request: Any, context: Context) -> Any:
        async with aborting(context), guard(context):
            return await method(read(request), context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with aborting(context), guard(context):
            events = method(read(request), context)
            try:
                async for event in events:
                    yield event
            finally:
                await events.aclose()

    # gRPC tells methods that yield from methods that write by their kind.
    run: Any = stream if inspect.isasyncgenfunction(method) else answer
    make: Any = _MAKERS[handler.request_streaming, handler.response_streaming]
    made: Handler = make(run, request_deserializer=decode, response_serializer=handler.response_serializer)
    return made
