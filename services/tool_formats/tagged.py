"""Calls whose arguments stand one by one between tags, as text: Qwen3-Coder, GLM-4.5.

They become JSON by the tool's schema: a text where it says string; the JSON value that the model wrote, where it is one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from services.tool_formats.interface import Calls, CallShape, Slot, Tags, ToolCall
from services.tool_formats.json_calls import long_id
from services.tool_formats.raw_json import is_json
from services.tool_formats.tape import MOST_NAME, Reading, Tape

# As Python writes them, and templates with it.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


class TaggedCalls(ABC):
    """Implements ``ToolFormat``: what both forms share."""

    name: str
    openings: tuple[str, ...]
    marks: tuple[str, ...]
    first = False

    @property
    @abstractmethod
    def shape(self) -> CallShape: ...

    @abstractmethod
    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]: ...

    def cut(self, text: str, calls: Calls) -> ToolCall | None:
        """The arguments that are complete."""
        return None if calls.begun is None else ToolCall(calls.begun.name, as_object(calls.members).removesuffix("}"))

    def call_id(self, name: str, index: int) -> str:
        return long_id(name, index)


class FunctionTags(TaggedCalls):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``."""

    name = "function_tags"

    def __init__(self, opening: str, closing: str) -> None:
        self.opening, self.closing = opening, closing
        self.openings = (opening, "<function=")
        self.marks = (opening, closing)

    @property
    @override
    def shape(self) -> CallShape:
        return CallShape(
            opening=self.opening,
            before=(Slot.SPACE,),
            call=("<function=", Slot.NAME, ">\n", Slot.TAGGED, "</function>"),
            after=(Slot.SPACE, self.closing),
            tags=Tags(before_key="<parameter=", between=(">\n",), after_value="</parameter>"),
        )

    @override
    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        if opening == self.opening:
            yield from tape.space()
            yield from tape.expect("<function=")
        name, _ = yield from tape.until(">", most=MOST_NAME)
        calls.begin(name.strip())
        found: dict[str, str] = {}
        calls.members = found
        while True:
            yield from tape.space()
            if not (yield from tape.accept("<parameter=")):
                break
            key, _ = yield from tape.until(">", most=MOST_NAME)
            value, _ = yield from tape.until("</parameter>")
            found[key.strip()] = as_json(value.removeprefix("\n").removesuffix("\n"), calls.schema_of(key.strip()))
        yield from tape.expect("</function>")
        calls.end(as_object(found))
        if opening == self.opening:
            yield from tape.space()
            yield from tape.expect(self.closing)


class KeyTags(TaggedCalls):
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

    name = "key_tags"

    def __init__(self, opening: str, closing: str, *tags: str) -> None:
        self.opening, self.closing = opening, closing
        self._key, self._value = tags[:2], tags[2:]
        self.openings = (opening,)
        self.marks = (opening, closing, *tags)

    @property
    @override
    def shape(self) -> CallShape:
        return CallShape(
            opening=self.opening,
            call=(Slot.NAME, "\n", Slot.TAGGED),
            after=(self.closing,),
            tags=Tags(before_key=self._key[0], between=(self._key[1], "\n", self._value[0]), after_value=self._value[1]),
        )

    @override
    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        name, mark = yield from tape.until(self._key[0], self.closing, most=MOST_NAME)
        calls.begin(name.strip())
        found: dict[str, str] = {}
        calls.members = found
        while mark == self._key[0]:
            key, _ = yield from tape.until(self._key[1], most=MOST_NAME)
            yield from tape.space()
            yield from tape.expect(self._value[0])
            value, _ = yield from tape.until(self._value[1])
            found[key.strip()] = as_json(value, calls.schema_of(key.strip()))
            yield from tape.space()
            if not (yield from tape.accept(self._key[0])):
                yield from tape.expect(self.closing)
                mark = self.closing
        calls.end(as_object(found))


def as_object(members: Mapping[str, str]) -> str:
    """A JSON object of values that are JSON."""
    return "{" + ", ".join(f"{_text(key)}: {value}" for key, value in members.items()) + "}"


def as_json(text: str, schema: Any) -> str:
    """A value as JSON: what the text is where the schema allows that, otherwise the text."""
    kinds = kinds_of(schema)
    value = _PYTHON.get(text.strip(), text.strip())
    if kinds == {"string"} or not is_json(value):
        return _text(text)
    kind = _KINDS.get(value[0], "number")
    if kinds and kind not in kinds and not (kind == "number" and "integer" in kinds) and "string" in kinds:
        return _text(text)
    return value


def kinds_of(schema: Any) -> set[str]:
    """The types that a schema says, as far as it says them openly; none: it does not."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    if kinds is None and isinstance(named := schema.get("enum"), list):
        return {"string"} if named and all(isinstance(each, str) for each in named) else set()
    if kinds is None and isinstance(parts := schema.get("anyOf") or schema.get("oneOf"), list):
        each = [kinds_of(part) for part in parts]
        return set().union(*each) if all(each) else set()
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {each for each in listed if isinstance(each, str)}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
