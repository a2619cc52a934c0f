"""Finds calls of tools in an answer's text, which may arrive in pieces of any size."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from services.api.http.openai.tool_choice import ToolUse
from services.tool_formats.interface import ToolCall, ToolFormat
from services.tool_formats.raw_json import members


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What a piece of text adds to a message: content, or a part of a call.

    Attributes:
        call: the call's place among the answer's calls; None: content.
        name: the function, in the first delta of a call.
        text: content, or a part of the arguments.
    """

    text: str = ""
    call: int | None = None
    id: str = ""
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        """As in ``choices[].delta``."""
        if self.call is None:
            return {"content": self.text}
        called: dict[str, Any] = {"index": self.call, "function": {"arguments": self.text}}
        if self.name:
            called |= {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}
        return {"tool_calls": [called]}


class CallReader(Protocol):
    """Reads one choice's text."""

    def push(self, text: str) -> list[Delta]:
        """What more text adds."""

    def finish(self) -> list[Delta]:
        """What the end of the text adds."""

    @property
    def calls(self) -> int:
        """Calls found so far."""


def reader_for(tools: ToolUse | None, form: ToolFormat | None) -> CallReader:
    """A reader of one choice.

    Args:
        form: how the model writes calls where it is free to write text as well.
    """
    if tools is None:
        return PlainText()
    if tools.mode == "named":
        return NamedCall(tools.called)
    if tools.mode == "required" or form is None:
        return ListedCalls()
    return CallsInText(tools, form)


class PlainText:
    """Implements ``CallReader``: all text is content."""

    calls = 0

    def push(self, text: str) -> list[Delta]:
        return [Delta(text=text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class NamedCall:
    """Implements ``CallReader``: all text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self.calls:
            return [Delta(text=text, call=0)]
        self.calls = 1
        return [Delta(text=text, call=0, id=call_id(), name=self._name)]

    def finish(self) -> list[Delta]:
        return []


class CallsInText:
    """Implements ``CallReader``: calls stand in the text in the model's own form. All other text is content."""

    def __init__(self, tools: ToolUse, form: ToolFormat) -> None:
        self._tools = tools
        self._form = form
        # Text not yet read: it may begin a call, or lies within one.
        self._held = ""
        self._inside = False
        self._begun = False
        # What has come after a call, if it is space; None: no call, or text after it.
        self._space: str | None = None
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        return self._read(ended=False)

    def finish(self) -> list[Delta]:
        found = self._read(ended=True)
        rest, self._held = self._held, ""
        return found + self._content(rest)

    def _read(self, *, ended: bool) -> list[Delta]:
        found: list[Delta] = []
        while self._held:
            if not self._inside:
                found += self._until_opening()
                if not self._inside:
                    break
            read = self._form.read(self._held, self._tools.schemas, ended=ended)
            if read is None:
                break
            taken, self._held, self._inside = self._held[: read.end], self._held[read.end :], False
            found += [delta for call in read.calls for delta in self._next(call)] or self._content(taken)
        return found

    def _until_opening(self) -> list[Delta]:
        """Content before what may begin a call; sets ``_inside`` where it does."""
        mark = self._form.opening
        if not mark:
            self._inside, self._begun = not self._begun, True
            text, self._held = ("", self._held) if self._inside else (self._held, "")
            return self._content(text)
        before, hit, after = self._held.partition(mark)
        if hit:
            self._held, self._inside = hit + after, True
            return self._content(before)
        keep = _beginning(self._held, mark)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._content(shown)

    def _content(self, text: str) -> list[Delta]:
        if self._space is not None:
            # Space after a call belongs to the text only if text follows.
            self._space += text
            if not self._space.strip():
                return []
            text, self._space = self._space, None
        return [Delta(text=text)] if text else []

    def _next(self, call: ToolCall) -> list[Delta]:
        index = self.calls
        self.calls, self._space = self.calls + 1, ""
        return [Delta(call=index, id=call_id(), name=call.name), Delta(text=call.arguments, call=index)]


class ListedCalls:
    """Implements ``CallReader``: the text is a JSON list of calls, as a grammar has it: first the name, then the arguments.

    A call is told as soon as it is complete. Of a call that was cut short, the arguments so far are told at the end.
    """

    def __init__(self) -> None:
        self._held = ""
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        found: list[Delta] = []
        while (start := self._held.find("{")) >= 0:
            try:
                call, end = members(self._held, start)
            except ValueError:
                break
            found += self._told(json.loads(call["name"]), call["arguments"])
            self._held = self._held[end:]
        return found

    def finish(self) -> list[Delta]:
        head, mark, arguments = self._held.partition('"arguments"')
        self._held = ""
        try:
            name, _ = members(head.lstrip("[, \n\t\r").rstrip(", \n\t\r") + "}")
        except ValueError:
            return []
        return self._told(json.loads(name["name"]), arguments.lstrip(": \n\t\r")) if mark and "name" in name else []

    def _told(self, name: str, arguments: str) -> list[Delta]:
        self.calls += 1
        index = self.calls - 1
        return [Delta(call=index, id=call_id(), name=name), Delta(call=index, text=arguments)]


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` with which ``mark`` begins."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


def call_id() -> str:
    """A call's id."""
    return f"call_{secrets.token_hex(12)}"
