"""Cuts JSON into its parts without changing a character of them.

Reading a value and writing it anew is not the same text: 1.0 and 1e999, long integers and escaped characters come out
otherwise, or not at all.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


# Numbers stay texts: some are too large for Python, which would refuse them.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def value_end(text: str, start: int) -> int:
    """Where the JSON value ends that begins at ``start``, behind white space.

    Raises:
        ValueError: there is none, or it is not complete.
    """
    try:
        return _DECODER.raw_decode(text, _behind_space(text, start))[1]
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def members(text: str) -> tuple[dict[str, str], int]:
    """The values of the JSON object with which a text begins, each as its own text, and where the object ends.

    Raises:
        ValueError: there is no complete object; an incomplete one is none.
    """
    at = _expect(text, 0, "{")
    found: dict[str, str] = {}
    if _next(text, at) == "}":
        return found, _expect(text, at, "}")
    while True:
        name, begin = _member(text, at)
        at = value_end(text, begin)
        found[name] = text[begin:at]
        if _next(text, at) == "}":
            return found, _expect(text, at, "}")
        at = _expect(text, at, ",")


def begun_members(text: str) -> dict[str, str]:
    """As ``members``, of an object that is cut short: the last value may be incomplete, or empty."""
    found: dict[str, str] = {}
    begun: tuple[str, int] | None = None
    try:
        at = _expect(text, 0, "{")
        while True:
            begun = name, begin = _member(text, at)
            at = value_end(text, begin)
            found[name], begun = text[begin:at], None
            at = _expect(text, at, ",")
    except ValueError:
        if begun is not None:
            found[begun[0]] = text[begun[1] :]
        return found


def is_json(text: str) -> bool:
    """Whether a text is one JSON value."""
    try:
        return _behind_space(text, value_end(text, 0)) == len(text)
    except ValueError:
        return False


def _member(text: str, start: int) -> tuple[str, int]:
    """A member's name, and where its value begins."""
    begin = _behind_space(text, start)
    end = value_end(text, begin)
    name = json.loads(text[begin:end]) if text[begin] == '"' else None
    if not isinstance(name, str):
        raise ValueError("a member has no name")
    return name, _behind_space(text, _expect(text, end, ":"))


def _next(text: str, start: int) -> str:
    at = _behind_space(text, start)
    return text[at : at + 1]


def _expect(text: str, start: int, mark: str) -> int:
    at = _behind_space(text, start)
    if not text.startswith(mark, at):
        raise ValueError(f"{mark} is missing")
    return at + 1


def _behind_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()
