"""Finds calls of tools in an answer's text, which may arrive in pieces of any size."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

from services.api.http.openai.tool_choice import ToolUse

# A stop string for answers that may hold one call only.
END_OF_CALL = "</tool_call>"
_OPEN, _CLOSE = "<tool_call>", END_OF_CALL


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


def reader_for(tools: ToolUse | None) -> CallReader:
    """A reader of one choice."""
    if tools is None:
        return PlainText()
    if tools.mode == "named":
        return NamedCall(tools.called)
    return EnvelopedCalls(tools) if tools.mode == "auto" else ListedCalls(tools)


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


class EnvelopedCalls:
    """Implements ``CallReader``: calls lie between ``<tool_call>`` and ``</tool_call>``.

    All other text, and what is no valid call, is content.
    """

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        # Text not yet read: it may begin an envelope, or lies within one.
        self._held = ""
        self._inside = False
        # What has come after a call, if it is space; None: no call, or text after it.
        self._space: str | None = None
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        found: list[Delta] = []
        while True:
            mark = _CLOSE if self._inside else _OPEN
            before, hit, after = self._held.partition(mark)
            if not hit:
                break
            found += self._call(before) if self._inside else self._content(before)
            self._held, self._inside = after, not self._inside
        if not self._inside:
            keep = _beginning(self._held, _OPEN)
            shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            found += self._content(shown)
        return found

    def finish(self) -> list[Delta]:
        rest, self._held = self._held, ""
        if not self._inside:
            return self._content(rest)
        # A model may end its turn without closing the envelope; an answer that may hold one call ends at ``END_OF_CALL``.
        return self._call(rest) if _parse(rest) is not None else self._content(_OPEN + rest)

    def _content(self, text: str) -> list[Delta]:
        if self._space is not None:
            # Space after a call belongs to the text only if text follows.
            self._space += text
            if not self._space.strip():
                return []
            text, self._space = self._space, None
        return [Delta(text=text)] if text else []

    def _call(self, inner: str) -> list[Delta]:
        call = _parse(inner)
        if call is None or call[0] not in self._tools.names:
            return self._content(_OPEN + inner + _CLOSE)
        return self._next(*call)

    def _next(self, name: str, arguments: str) -> list[Delta]:
        index = self.calls
        self.calls, self._space = self.calls + 1, ""
        return [Delta(call=index, id=call_id(), name=name), Delta(text=arguments, call=index)]


class ListedCalls:
    """Implements ``CallReader``: the text is a JSON list of calls; each is told as soon as it is complete."""

    def __init__(self, tools: ToolUse) -> None:
        self._tools = tools
        self._held = ""
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        self._held += text
        found: list[Delta] = []
        while (start := self._held.find("{")) >= 0:
            try:
                call, end = json.JSONDecoder().raw_decode(self._held, start)
            except (ValueError, RecursionError):
                break
            found += [
                Delta(call=self.calls, id=call_id(), name=str(call.get("name"))),
                Delta(call=self.calls, text=json.dumps(call.get("arguments", {}), ensure_ascii=False)),
            ]
            self.calls += 1
            self._held = self._held[end:]
        return found

    def finish(self) -> list[Delta]:
        # Only an answer that was cut short has anything left.
        rest, self._held = self._held.strip(" \n\t[],"), ""
        return [Delta(text=rest)] if rest else []


def _parse(inner: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None: it is none."""
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        return found["name"], arguments
    return found["name"], json.dumps(arguments, ensure_ascii=False)


def _beginning(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` with which ``mark`` begins."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


def call_id() -> str:
    """A call's id."""
    return f"call_{secrets.token_hex(12)}"
