"""What a public call must pass before its method sees it: a key, a slot, and a message without unknown fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.access.gate import Caller, Gate
from services.links.auth import bearer_of
from services.links.guarded_calls import Context, Handler, Next, wrapped
from speculation.errors import InvalidArgument, ResourceExhausted

# Only Check is exempt: a Watch call never ends, so anyone could use up the server's concurrent calls with them.
_HEALTH = "/grpc.health.v1.Health/Check"
# Whose call the running method answers. gRPC runs each in a task of its own.
current_caller: ContextVar[Caller] = ContextVar("current_caller")


class PublicEntrance(grpc.aio.ServerInterceptor):
    """Lets in calls with a valid key while there is a slot; health checks always.

    Args:
        most: calls at once.
    """

    def __init__(self, gate: Gate, most: int) -> None:
        self._gate = gate
        self._most = most
        self._running = 0

    async def intercept_service(self, continuation: Next, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == _HEALTH:
            return handler
        # Of the public methods, reflection alone takes a stream.
        return wrapped(handler, self._guard, only_known, handler.request_deserializer)

    @asynccontextmanager
    async def _guard(self, context: Context) -> AsyncIterator[None]:
        current_caller.set(self._gate.caller(bearer_of(context.invocation_metadata()), context.peer()))
        if self._running >= self._most:
            raise ResourceExhausted(f"{self._running} calls are under way already (max_concurrent_requests)")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


_Message = TypeVar("_Message")


def only_known(message: _Message) -> _Message:
    """The same message. What is no message is let pass.

    Raises:
        InvalidArgument: it, or a message in it, has a field that this server does not know; names it by its number.
    """
    if isinstance(message, Message):
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        # Looked for one by one only where there is one: that takes longer than the rest of the call's checks.
        if known.ByteSize() != message.ByteSize():
            _check(message, "")
    return message


def _check(message: Message, path: str) -> None:
    if len(unknown := UnknownFieldSet(message)):
        number = min(unknown[index].field_number for index in range(len(unknown)))
        raise InvalidArgument(f"{path}#{number}", "set", f"unset: {message.DESCRIPTOR.name} has no field {number} here")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        entries: list[Any] = list(value) if field.is_repeated else [value]
        for index, entry in enumerate(entries):
            _check(entry, f"{path}{field.name}{f'[{index}]' if field.is_repeated else ''}.")
