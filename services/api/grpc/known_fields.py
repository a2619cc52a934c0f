"""Finds what a message holds besides the fields that this server knows: gRPC lets it pass, and nobody would honour it."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from speculation.errors import InvalidArgument

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
