"""Reads calls from answers whose grammar allows nothing else: a JSON list of calls, or the arguments of one."""

from __future__ import annotations

import json
from typing import Protocol

from services.tool_formats.json_calls import NewId
from services.tool_formats.raw_json import begun_members, is_json
from services.tool_formats.tape import EndedError, OtherwiseError, Reading, Tape

# A call's place, and its id and name, where it begins; a part of its arguments.
Said = tuple[int, str, str, str]


class ForcedCalls(Protocol):
    """Reads a text that is nothing but calls."""

    def push(self, text: str) -> list[Said]:
        """What more text adds."""

    def finish(self) -> list[Said]:
        """What the end of the text adds."""


class NamedCall:
    """Implements ``ForcedCalls``: all text is the arguments of one function."""

    def __init__(self, name: str, new_id: NewId) -> None:
        self._name = name
        self._new_id = new_id
        self._begun = False

    def push(self, text: str) -> list[Said]:
        if not text:
            return []
        if self._begun:
            return [(0, "", "", text)]
        self._begun = True
        return [(0, self._new_id(self._name, 0), self._name, text)]

    def finish(self) -> list[Said]:
        return []


class ListedCalls:
    """Implements ``ForcedCalls``: a JSON list of calls, as a grammar has it: first the name, then the arguments.

    A call is told as soon as it is complete. Of a call that was cut short, the arguments so far are told at the end.
    """

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._tape = Tape()
        self._calls = 0
        self._found: list[Said] = []
        self._steps = self._read()

    def push(self, text: str) -> list[Said]:
        self._tape.feed(text)
        next(self._steps, None)
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Said]:
        self._tape.end()
        return self.push("")

    def _read(self) -> Reading[None]:
        try:
            while True:
                yield from self._tape.until("{")
                self._tape.forget()
                self._tape.put_back("{")
                self._tell((yield from self._tape.json()))
                self._tape.forget()
        except (EndedError, OtherwiseError):
            self._tape.rest()
            self._tell(self._tape.forget())

    def _tell(self, text: str) -> None:
        call = begun_members(text)
        name = call.get("name", "")
        if "arguments" in call and is_json(name):
            index, self._calls = self._calls, self._calls + 1
            known = json.loads(name)
            self._found += [(index, self._new_id(known, index), known, ""), (index, "", "", call["arguments"])]
