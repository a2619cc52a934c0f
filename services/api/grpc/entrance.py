"""What a public call must pass before its method sees it: a key, a slot, and a message in time without unknown fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from typing_extensions import override

from services.access.gate import Caller, Gate
from services.api.call_slots import CallSlots
from services.api.config import PublicServerConfig
from services.api.grpc.early import LARGE, early
from services.links.auth import bearer_of
from services.links.guarded_calls import Handler, Next
from services.links.status import Context
from speculation.errors import InvalidArgument

# Needs no key and no slot: a supervisor asks it of a busy server, too.
_CHECK = "/grpc.health.v1.Health/Check"
_CHECKS, _CHECKS_OF_ONE_ADDRESS = 256, 16
# Streams that never end, by their names in the audit log. They count as a request of their key for as long as they last.
_ENDLESS = {
    "/grpc.health.v1.Health/Watch": "Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "ServerReflectionInfo",
}
# The part of the slots that they may take, all together.
_ENDLESS_PART = 8
# Seconds within which the message of a call must arrive.
_ARRIVES_S = 30.0
_CHECK_ARRIVES_S = 5.0
# Whose call the running method answers. gRPC runs each in a task of its own.
current_caller: ContextVar[Caller] = ContextVar("current_caller")


class PublicEntrance(grpc.aio.ServerInterceptor):
    """Lets in calls with a valid key while there is a slot; health checks always."""

    def __init__(self, gate: Gate, config: PublicServerConfig) -> None:
        self._gate = gate
        self._send_s = config.send_timeout_s
        self._slots = CallSlots(config.max_concurrent_requests, "max_concurrent_requests")
        self._endless = CallSlots(max(1, config.max_concurrent_requests // _ENDLESS_PART), "for streams that do not end")
        self._checks = CallSlots(_CHECKS, "health checks", of_one=_CHECKS_OF_ONE_ADDRESS)

    @override
    async def intercept_service(self, continuation: Next, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = handler_call_details.method
        if name == _CHECK:
            return early(handler, self._check, only_known, arrives_s=_CHECK_ARRIVES_S, send_s=self._send_s)

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[AbstractContextManager[None]]:
            caller = self._gate.caller(bearer_of(context.invocation_metadata()), context.peer())
            current_caller.set(caller)
            with self._slots.taken(context.peer()):
                if name in _ENDLESS:
                    with self._endless.taken(context.peer()), self._gate.counted(caller, _ENDLESS[name]):
                        yield nullcontext()
                else:
                    yield self._gate.arriving(caller)

        return early(handler, guard, only_known, arrives_s=_ARRIVES_S, send_s=self._send_s)

    @asynccontextmanager
    async def _check(self, context: Context) -> AsyncIterator[AbstractContextManager[None]]:
        with self._checks.taken(context.peer()):
            yield nullcontext()


_Message = TypeVar("_Message")
# Entries of any field that are no numbers; every field has a limit of its own, far below.
_MOST_ENTRIES = 1 << 16
_NOT_NUMBERS = (FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_STRING)


def only_known(message: _Message) -> _Message:
    """The same message. What is none is let pass.

    Raises:
        InvalidArgument: it, or a message in it, has a field that this server does not know; names it by its number.
    """
    if isinstance(message, Message):
        # Millions of empty texts, messages or unknown fields fit into a message: they are refused by their number.
        _check_counts(message, "")
        if (size := message.ByteSize()) > LARGE:
            # Neither copied nor looked through: both take as long as the message is.
            message.DiscardUnknownFields()
            if unknown := size - message.ByteSize():
                raise InvalidArgument("request", f"{unknown} bytes of unknown fields", "of fields that the server knows")
            return message
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        # Looked for one by one only where there is one: that takes longer than the rest of the call's checks.
        if known.ByteSize() != message.ByteSize():
            _check(message, "")
    return message


def _check_counts(message: Message, path: str) -> None:
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        if field.is_repeated and field.cpp_type in _NOT_NUMBERS and len(value) > _MOST_ENTRIES:
            raise InvalidArgument(name, f"{len(value)} entries", f"at most {_MOST_ENTRIES} entries")
        if field.message_type is not None and not field.is_repeated:
            _check_counts(value, f"{name}.")


def _check(message: Message, path: str) -> None:
    if len(unknown := UnknownFieldSet(message)):
        number = unknown[0].field_number
        raise InvalidArgument(f"{path}#{number}", "set", f"unset: {message.DESCRIPTOR.name} has no field {number} here")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        entries: list[Any] = list(value) if field.is_repeated else [value]
        for index, entry in enumerate(entries):
            _check(entry, f"{path}{field.name}{f'[{index}]' if field.is_repeated else ''}.")
