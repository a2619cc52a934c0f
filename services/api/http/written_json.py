"""Writes answers as JSON. A long one is written a part at a time: while it writes, ``json`` keeps the interpreter's lock, so
that a thread would not help others to their turns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

# Values of a part, and characters after which others have their turns: a millisecond or two.
AT_ONCE, _CHARACTERS = 4096, 64 << 10
_NESTED = (dict, list, tuple)


async def write(content: Any) -> bytes:
    """As ``written``, while others have their turns of the event loop. Nobody may change the content meanwhile."""
    if _size(content) <= AT_ONCE:
        return _text(content).encode()
    parts, length = [], 0
    for part in _parts(content):
        if length > _CHARACTERS:
            await asyncio.sleep(0)
            length = 0
        parts.append(part.encode())
        length += len(part)
    return b"".join(parts)


def written(content: Any) -> bytes:
    """JSON in UTF-8, without blanks."""
    return b"".join(part.encode() for part in _parts(content))


def _parts(content: Any) -> Iterator[str]:
    if _size(content) <= AT_ONCE:
        yield _text(content)
    elif isinstance(content, dict):
        begin = "{"
        for name, value in content.items():
            yield begin + _text({name: 0})[1:-2]
            yield from _parts(value)
            begin = ","
        yield "}"
    else:
        held: list[Any] = []
        begin, most = "[", AT_ONCE
        for entry in content:
            size = _size(entry) if isinstance(entry, _NESTED) else 1
            if held and size > most:
                yield begin + _text(held)[1:-1]
                begin, held, most = ",", [], AT_ONCE
            if size > most:
                yield begin
                yield from _parts(entry)
                begin = ","
            else:
                held.append(entry)
                most -= size
        yield (begin + _text(held)[1:-1] if held else "") + "]"


def _size(content: Any) -> int:
    """How many values there are in it, or some number above ``AT_ONCE``."""
    size, nested = 1, [content] if isinstance(content, _NESTED) else []
    while nested:
        each = nested.pop()
        values = each.values() if isinstance(each, dict) else each
        size += len(values)
        if size > AT_ONCE:
            break
        nested += [value for value in values if isinstance(value, _NESTED)]
    return size


def _text(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
