"""``[TOOL_CALLS]name[ARGS]{...}``: Mistral's models since the eleventh version of their tokenizer."""

from __future__ import annotations

from services.tool_formats.interface import Calls, CallShape, Slot, ToolCall
from services.tool_formats.json_calls import short_id
from services.tool_formats.tape import MOST_NAME, Reading, Tape


class NamedArguments:
    """Implements ``ToolFormat``."""

    first = False

    def __init__(self, name: str, opening: str, middle: str, id_mark: str) -> None:
        self.name = name
        self.opening = opening
        self.middle = middle
        self._id_mark = id_mark
        self.openings: tuple[str, ...] = (opening,)
        self.marks: tuple[str, ...] = (opening, middle, id_mark)

    @property
    def shape(self) -> CallShape:
        return CallShape(opening=self.opening, call=(Slot.NAME, self.middle, Slot.ARGUMENTS))

    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        name, mark = yield from tape.until(self.middle, self._id_mark, "{", most=MOST_NAME)
        own = ""
        if mark == self._id_mark:
            own, _ = yield from tape.until(self.middle, most=MOST_NAME)
        if mark == "{":
            tape.put_back(mark)
        calls.begin(name.strip(), own.strip())
        calls.end((yield from tape.json()))

    def cut(self, text: str, calls: Calls) -> ToolCall | None:
        begun = calls.begun
        return None if begun is None else ToolCall(begun.name, text.lstrip(), begun.id)

    def call_id(self, name: str, index: int) -> str:
        return short_id(name, index)
