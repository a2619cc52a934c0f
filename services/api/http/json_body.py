"""Reads a request's body: JSON within limits on size, depth and time. JSON that parsers read differently is refused."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive

from services.api.http.openai.errors import HttpError, Refused
from speculation import limits
from speculation.errors import Cancelled

MAX_DEPTH = 100
# Objects, lists and members of objects together. A million of them would stop the process for seconds while they are made.
MAX_PARTS = 1 << 16
_OUTSIDE = re.compile(rb'[^"]++|"(?:[^"\\]|\\.)*+"?+', re.DOTALL)
_Read = TypeVar("_Read")
# Bytes beyond which JSON is read in a thread, so that it does not delay other requests.
_LARGE = 64 << 10


async def read_body(receive: Receive, headers: Headers, arrives_s: float, read: Callable[[dict[str, Any]], _Read]) -> _Read:
    """What ``read`` makes of the body's JSON object.

    Args:
        arrives_s: seconds that it may take.
        read: called in a thread where the body is large: it looks at every token id.

    Raises:
        HttpError: it is too large, too slow, or not declared as JSON.
        Refused: it is no JSON object.
        OutriderError: as ``read``.
        Cancelled: the client has gone.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Other types could be posted by any page in a browser on this machine.
        raise HttpError(415, "unsupported_media_type", f"content-type is {kind or 'unset'}: must be application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "unsupported_media_type", "content-encoding must be unset: bodies are read as they are")
    length = headers.get("content-length", "")
    # Python refuses to read thousands of digits; the body itself is counted, too.
    _check_size(int(length[:20]) if length.isdecimal() else 0)
    try:
        async with asyncio.timeout(arrives_s):
            body = await _collect(receive)
    except TimeoutError:
        raise HttpError(
            408, "request_timeout", f"the body has not arrived within {arrives_s:g} s (server.http_arrives_s)"
        ) from None
    if len(body) > _LARGE:
        return await asyncio.to_thread(lambda: read(parse_object(body)))
    return read(parse_object(body))


async def _collect(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client has gone")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        _check_size(size)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_size(size: int) -> None:
    most = limits.MAX_PUBLIC_MESSAGE_BYTES
    if size > most:
        raise HttpError(413, "request_too_large", f"the body has more than {most >> 20} MiB, the most that is read")


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object of at most ``MAX_DEPTH`` levels, with unique keys, finite numbers and valid Unicode.

    Raises:
        Refused: it is none; says why.
    """
    _check_parts(body)
    infinite: list[str] = []

    def number(text: str) -> float:
        if math.isinf(value := float(text)):
            infinite.append(text)
        return value

    try:
        # Given bytes, json would read UTF-16 and UTF-32 as well.
        text = body.decode("utf-8-sig")
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=number)
    except RecursionError:
        raise _not_json(f"nested deeper than {MAX_DEPTH} levels") from None
    except Refused:
        raise
    except ValueError as error:
        raise _not_json(f"no JSON ({error})") from None
    _check(found)
    if not isinstance(found, dict):
        raise _not_json(_name_of(found))
    if infinite:
        raise Refused(_infinite_in(found) or "body", infinite[0], "a number that a float of 64 bits can hold")
    return found


def _check_parts(body: bytes) -> None:
    # Texts may hold any number of these characters, but few do.
    if _parts(body) <= MAX_PARTS:
        return
    found = 0
    for piece in _OUTSIDE.finditer(body):
        if not piece[0].startswith(b'"'):
            found += _parts(piece[0])
        if found > MAX_PARTS:
            raise _not_json(f"more than {MAX_PARTS} objects, lists and members of objects")


def _parts(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def _infinite_in(value: Any, path: str = "") -> str | None:
    """The name of the first infinite number in a value of few levels; None: there is none."""
    if isinstance(value, float) and math.isinf(value):
        return path
    entries: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        entries = ((f"{path}.{key}" if path else str(key), each) for key, each in value.items())
    elif isinstance(value, list):
        entries = ((f"{path}[{index}]", each) for index, each in enumerate(value))
    return next((named for name, each in entries if (named := _infinite_in(each, name)) is not None), None)


def _not_json(why: str) -> Refused:
    return Refused("body", why, "a JSON object in UTF-8", "invalid_json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Refused(key, "there twice", "there once: only one of its values could count", "duplicate_parameter")
            seen.add(key)
    return found


def _no_constant(name: str) -> NoReturn:
    raise _not_json(f"no JSON ({name})")


def _check(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                below += [*entry, *entry.values()]
            elif isinstance(entry, list):
                below += entry
            elif isinstance(entry, str) and not _is_unicode(entry):
                raise _not_json("a text with half of a surrogate pair")
        level = below
        if not level:
            return
    raise _not_json(f"nested deeper than {MAX_DEPTH} levels")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name_of(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
