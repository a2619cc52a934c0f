"""Lets calls in, or refuses them, before their message has come, and gives up on clients that neither send nor read.

gRPC waits for the message of a call before it runs a unary method, for ever, and counts nobody meanwhile. Unary calls and
streams look alike to a client. So all methods are served as streams here: a call is let in, or not, by its headers, and then
its message is read within a time limit.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.links.guarded_calls import Handler
from services.links.status import Context, aborting
from speculation.errors import DeadlineExceeded, InvalidArgument

# Bytes of a message beyond which it is checked and read in a thread.
LARGE = 64 << 10


def early(
    handler: Handler,
    guard: Callable[[Context], AbstractAsyncContextManager[AbstractContextManager[None]]],
    check: Callable[[Any], Any],
    *,
    arrives_s: float,
    send_s: float,
) -> Handler:
    """A handler that runs within ``guard``, which is entered before there is a message.

    Args:
        guard: gives what is entered while the message arrives.
        check: makes of a message what the method gets.
        arrives_s: seconds within which the message must arrive. A stream of messages may take any time.
        send_s: seconds within which the client must make room for a message that the method returns or yields.
    """
    method: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def run(messages: Any, context: Context) -> None:
        async with aborting(context), guard(context) as arriving:
            if handler.request_streaming:
                request = messages
            else:
                try:
                    with arriving:
                        async with asyncio.timeout(arrives_s):
                            request = await context.read()
                except TimeoutError:
                    raise DeadlineExceeded(f"the call's message has not arrived within {arrives_s:g} s") from None
                if request is grpc.aio.EOF:
                    raise InvalidArgument("request", "unset", "a message of the type that the method takes")
                # In a thread where it is large: it is looked through entry by entry.
                large = request.ByteSize() > LARGE if isinstance(request, Message) else False
                request = await asyncio.to_thread(check, request) if large else check(request)
            if inspect.isasyncgenfunction(method):
                await _send_all(method(request, context), context, send_s)
            elif handler.response_streaming:
                await method(request, context)
            else:
                await send(context, await method(request, context), send_s)

    return grpc.stream_stream_rpc_method_handler(
        run, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )


async def send(context: Context, message: Any, seconds: float) -> None:
    """Write a message.

    Raises:
        DeadlineExceeded: the client makes no room for it in time.
    """
    try:
        async with asyncio.timeout(seconds):
            await context.write(message)
    except TimeoutError:
        why = f"the client has taken nothing of its answer for {seconds:g} s (server.send_timeout_s)"
        raise DeadlineExceeded(why) from None


async def _send_all(events: Any, context: Context, seconds: float) -> None:
    try:
        async for event in events:
            await send(context, event, seconds)
    finally:
        await events.aclose()
