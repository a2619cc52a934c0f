"""Calls that are JSON objects with ``name``, and ``arguments`` or ``parameters``; one, or a list, behind a mark."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable

from services.tool_formats.interface import Calls, CallShape, Slot, ToolCall, json_object
from services.tool_formats.raw_json import begun_members, is_json, members
from services.tool_formats.tape import OtherwiseError, Reading, Tape

# Makes an id of a call's name and its place in the answer.
NewId = Callable[[str, int], str]
_ARGUMENTS = ("arguments", "parameters")
# With one of these begins an object that may be a call.
_FIRST_NAMES = ("name", "type", "id", "function", *_ARGUMENTS)
_LETTERS = string.ascii_letters + string.digits
# What Mistral's templates take.
_SHORT_ID = 9


def long_id(name: str, index: int) -> str:
    """An id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_id(name: str, index: int) -> str:
    """An id of letters and digits, as Mistral's templates take them alone."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_SHORT_ID))


class JsonCalls:
    """Implements ``ToolFormat``.

    Args:
        closing: ends calls; empty: they end with their JSON.
        bare: calls also begin, at the beginning of an answer, without a mark.
        listed: models were taught lists alone; an object is read all the same.
    """

    def __init__(
        self,
        name: str,
        opening: str,
        closing: str = "",
        *,
        bare: bool = False,
        listed: bool = False,
        call_id: NewId = long_id,
    ) -> None:
        self.name = name
        self.opening = opening
        self.closing = closing
        self.openings: tuple[str, ...] = (opening, "{") if bare else (opening,)
        self.first = bare
        self.marks: tuple[str, ...] = (opening, closing) if closing else (opening,)
        self._listed_only = listed
        self._new_id = call_id

    @property
    def shape(self) -> CallShape:
        call, space = json_object("parameters" if self.first else "arguments"), Slot.SPACE
        if self.first:
            return CallShape(opening=self.opening, call=call, between=(space, ";", space), first=True)
        if not self._listed_only:
            return CallShape(opening=self.opening, before=(space,), call=call, after=(space, self.closing))
        end = (space, self.closing) if self.closing else ()
        return CallShape(
            opening=self.opening,
            before=(space, "[", space),
            call=call,
            between=(space, ",", space),
            after=(space, "]", *end),
        )

    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        if opening == "{":
            tape.put_back(opening)
        yield from tape.space()
        first = yield from tape.peek()
        if first == "[":
            yield from tape.expect("[")
            yield from self._listed(tape, calls)
        elif first == "{":
            yield from self._one(tape, calls)
            yield from self._more(tape, calls)
        else:
            raise OtherwiseError
        if self.closing:
            yield from tape.space()
            yield from tape.expect(self.closing)

    def _listed(self, tape: Tape, calls: Calls) -> Reading[None]:
        yield from tape.space()
        if (yield from tape.accept("]")):
            return
        while True:
            yield from tape.space()
            yield from self._one(tape, calls)
            yield from tape.space()
            if not (yield from tape.accept(",")):
                yield from tape.expect("]")
                return

    def _more(self, tape: Tape, calls: Calls) -> Reading[None]:
        """Further calls without a list, as Llama's models separate them."""
        while self.first:
            space = yield from tape.space()
            if tape.empty or not (yield from tape.accept(";")):
                tape.put_back(space)
                return
            yield from tape.space()
            yield from self._one(tape, calls)

    def _one(self, tape: Tape, calls: Calls) -> Reading[None]:
        # Before all of it has come: other JSON is not to wait for its end.
        yield from tape.expect("{")
        space = yield from tape.space()
        name = yield from tape.json()
        if not any(name == f'"{known}"' for known in _FIRST_NAMES):
            raise OtherwiseError
        tape.put_back("{" + space + name)
        call = named_call((yield from tape.json()))
        if call is None:
            raise OtherwiseError
        calls.begin(call.name, call.id)
        calls.end(call.arguments)

    def cut(self, text: str, calls: Calls) -> ToolCall | None:
        found = begun_members(text[max(0, text.find("{")) :])
        name = found.get("name", "")
        if not is_json(name) or not name.startswith('"') or json.loads(name) not in calls.schemas:
            return None
        return ToolCall(json.loads(name), next((found[key] for key in _ARGUMENTS if key in found), ""))

    def call_id(self, name: str, index: int) -> str:
        return self._new_id(name, index)


def named_call(text: str) -> ToolCall | None:
    """The call in a JSON object with ``name``, and ``arguments`` or ``parameters``; None: it is none."""
    try:
        found, end = members(text)
        name = json.loads(found.get("name", "null"))
        own = json.loads(found.get("id", "null"))
        arguments = next((found[key] for key in _ARGUMENTS if key in found), "{}")
        if arguments.startswith('"'):
            # Some models write the object as a text, which may have half of a surrogate pair: no answer can hold that.
            arguments = json.loads(arguments)
            arguments.encode()
    except ValueError:
        return None
    if text[end:].strip() or not isinstance(name, str) or not is_json(arguments):
        return None
    return ToolCall(name, arguments, own if isinstance(own, str) and own.isalnum() and own.isascii() else "")
