"""Reads a request's id and its trace from call metadata."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from speculation.errors import InvalidArgument

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
_MOST = 128
# Version, trace, parent, flags; later versions may append fields (www.w3.org/TR/trace-context/#traceparent-header).
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,64})?")

Metadata = Iterable[tuple[str, str | bytes]] | None


def request_id_of(metadata: Metadata) -> str:
    """The caller's id for its request; a random one if it gives none.

    Raises:
        InvalidArgument: there are several, or it is not 1 to 128 printable ASCII characters.
    """
    given = _values(metadata, REQUEST_ID)
    if not given:
        return uuid.uuid4().hex
    (name, *others) = given
    if others or not (1 <= len(name) <= _MOST and name.isascii() and name.isprintable()):
        raise InvalidArgument(REQUEST_ID, ", ".join(given)[: 2 * _MOST], f"one, of 1 to {_MOST} printable ASCII characters")
    return name


def traceparent_of(metadata: Metadata) -> str:
    """The caller's trace. Empty if it is missing or invalid, which the standard treats alike."""
    given = _values(metadata, TRACEPARENT)
    return given[0] if len(given) == 1 and _TRACE.fullmatch(given[0]) else ""


def _values(metadata: Metadata, key: str) -> list[str]:
    return [value for name, value in metadata or () if name == key and isinstance(value, str)]
