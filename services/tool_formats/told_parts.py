"""The parts of an answer as they are told, with white space only where it is part of the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from services.tool_formats.interface import ToolCall
from services.tool_formats.json_calls import NewId

Kind = Literal["text", "thought"]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer: of its text, of its thought, or a call."""

    kind: Literal["text", "thought", "call"]
    text: str = ""
    call: ToolCall | None = None


class ToldParts:
    """Parts that are told one after the other.

    Args:
        new_id: makes ids for calls that have none.
        trims: white space is told only once more of the same follows: around thoughts and calls it is nobody's.

    Attributes:
        last: what was told last; empty: nothing.
    """

    def __init__(self, new_id: NewId, *, trims: bool) -> None:
        self._new_id = new_id
        self._trims = trims
        self._found: list[AnswerPart] = []
        self._space = ""
        self._calls = 0
        self.last: Literal["text", "thought", "call", ""] = ""

    def add(self, kind: Kind, text: str) -> None:
        """Tell text of an answer, or of a thought."""
        if kind != self.last and self.last == "thought":
            self._space, text = "", text.lstrip()
        ready = text.rstrip() if self._trims else text
        if not ready:
            self._space += text
            return
        self._found.append(AnswerPart(kind, self._space + ready))
        self._space, self.last = text[len(ready) :], kind

    def call(self, call: ToolCall) -> None:
        """Tell a call."""
        own = call.id or self._new_id(call.name, self._calls)
        self._found.append(AnswerPart("call", call=replace(call, id=own)))
        self._space, self.last = "", "call"
        self._calls += 1

    def take(self) -> list[AnswerPart]:
        """What was told since the last time."""
        found, self._found = self._found, []
        return found

    def finish(self) -> list[AnswerPart]:
        """The space at the end of a text."""
        return [AnswerPart("text", self._space)] if self._space and self.last in ("text", "") else []
