"""Messages whose fields have the same names in ``speculation.messages`` and on the wire: copies these fields, both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

_Ours = TypeVar("_Ours")
_Wire = TypeVar("_Wire", bound=Message)


class SameFields(Generic[_Ours, _Wire]):
    """A dataclass and its form on the wire. Sequences become tuples; an optional field that is unset becomes None.

    Args:
        renamed: the names on the wire of fields that have another one there.
        by_hand: fields that are not copied: ``encode`` and ``decode`` are given them, or leave them at their default.

    Raises:
        KeyError: a field to be copied is not on the wire; raised at import.
    """

    def __init__(
        self,
        ours: type[_Ours],
        wire: type[_Wire],
        *,
        renamed: Mapping[str, str] | None = None,
        by_hand: Collection[str] = (),
    ) -> None:
        self._ours, self._wire = ours, wire
        on_wire = {each.name: each.name for each in dataclasses.fields(ours) if each.name not in by_hand}  # type: ignore[arg-type]
        on_wire |= renamed or {}
        known = wire.DESCRIPTOR.fields_by_name
        self._there = tuple(on_wire.values())
        # Of one name ``attrgetter`` would give the value itself, not a tuple of it.
        names = tuple(on_wire)
        self._values = attrgetter(*names) if len(names) > 1 else lambda message: (getattr(message, names[0]),)
        self._readers = [(name, _reader(known[there])) for name, there in on_wire.items()]

    def encode(self, message: _Ours, **by_hand: Any) -> _Wire:
        """The message for the wire."""
        return self._wire(**dict(zip(self._there, self._values(message), strict=True)), **by_hand)

    def decode(self, wire: _Wire, **by_hand: Any) -> _Ours:
        """Our message.

        Raises:
            InvalidArgument: its class refuses a value.
        """
        return self._ours(**{name: read(wire) for name, read in self._readers}, **by_hand)


def _reader(field: Any) -> Callable[[Message], Any]:
    """Reads a field of a message.

    Args:
        field: its descriptor, whose class depends on protobuf's implementation.
    """
    name: str = field.name
    if field.is_repeated:
        # A slice is read at once, an iterator one by one.
        return lambda wire: tuple(getattr(wire, name)[:])
    if field.has_presence:
        return lambda wire: getattr(wire, name) if wire.HasField(name) else None
    return attrgetter(name)
