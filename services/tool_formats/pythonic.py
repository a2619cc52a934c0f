"""Calls as Python writes them, in a list: ``[look(place="Bern", near=True)]``. Llama 3.2 and 4, LFM2 and others."""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any

from services.tool_formats.interface import Calls, ToolCall
from services.tool_formats.json_calls import long_id
from services.tool_formats.tape import MOST_NAME, OtherwiseError, Reading, Tape

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_OUTSIDE = re.compile(r"[\"'()\[\]{}]")
_INSIDE = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_MOST_DEPTH = 64
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonCalls:
    """Implements ``ToolFormat``.

    Args:
        opening, closing: marks around the list; empty: it is the beginning of an answer.
    """

    def __init__(self, name: str, opening: str = "", closing: str = "") -> None:
        self.name = name
        self.opening, self.closing = opening, closing
        self.openings: tuple[str, ...] = (opening,) if opening else ("[",)
        self.first = not opening
        self.marks: tuple[str, ...] = (opening, closing) if opening else ()

    @property
    def shape(self) -> None:
        """No grammar makes Python of a JSON schema."""

    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        if opening == self.opening:
            yield from tape.space()
            yield from tape.expect("[")
        while True:
            yield from tape.space()
            name, _ = yield from tape.until("(", most=MOST_NAME)
            if not _NAME.fullmatch(name):
                raise OtherwiseError
            calls.begin(name)
            inner = yield from _to_bracket(tape)
            calls.end(arguments_of(inner))
            yield from tape.space()
            if not (yield from tape.accept(",")):
                yield from tape.expect("]")
                break
        if self.closing:
            yield from tape.space()
            yield from tape.expect(self.closing)

    def cut(self, text: str, calls: Calls) -> ToolCall | None:
        # What was written so far is no JSON, and begins none.
        return None if calls.begun is None else ToolCall(calls.begun.name, "{")

    def call_id(self, name: str, index: int) -> str:
        return long_id(name, index)


def _to_bracket(tape: Tape) -> Reading[str]:
    """The text up to the bracket that closes the one before it; the bracket is read, too."""
    found, depth, quote = list[str](), 1, ""
    while depth:
        hit = tape.find(_INSIDE[quote] if quote else _OUTSIDE)
        if hit is None or (hit[0] == "\\" and hit.end() == len(hit.string)):
            found.append(tape.rest(0 if hit is None else 1))
            yield from tape.more()
            continue
        found.append(tape.take(hit.end() + (hit[0] == "\\")))
        if quote:
            quote = "" if hit[0] == quote else quote
        elif hit[0] in "'\"":
            quote = hit[0]
        else:
            depth += 1 if hit[0] in "([{" else -1
        if depth > _MOST_DEPTH:
            raise OtherwiseError
    return "".join(found)[:-1]


def arguments_of(inner: str) -> str:
    """The arguments between a call's brackets, as a JSON object.

    Raises:
        OtherwiseError: they are not all named, or are no values.
    """
    try:
        call = ast.parse(f"f({inner})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise OtherwiseError
        found = {str(each.arg): _value(each.value) for each in call.keywords}
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise OtherwiseError from error


def _value(node: ast.expr) -> Any:
    """What a literal means. A single name is a text: templates leave out quotes."""
    match node:
        case ast.Name():
            return _CONSTANTS.get(node.id, node.id)
        case ast.List() | ast.Tuple():
            return [_value(each) for each in node.elts]
        case ast.Dict():
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
            if len(keys) != len(node.values) or not all(isinstance(key, str) for key in keys):
                raise OtherwiseError
            return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and (not isinstance(value, str | int | float) or (isinstance(value, float) and math.isinf(value))):
        raise OtherwiseError
    return value
