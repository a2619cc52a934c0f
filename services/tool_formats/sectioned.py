"""Calls between marks of their own, all of them between another pair: DeepSeek V3 and R1, V3.1, Kimi K2."""

from __future__ import annotations

from typing import Literal

from services.tool_formats.interface import Calls, CallShape, Slot, Step, ToolCall
from services.tool_formats.json_calls import long_id
from services.tool_formats.tape import MOST_NAME, Reading, Tape

_FENCE, _FENCE_END = "```json", "```"


class SectionedCalls:
    """Implements ``ToolFormat``.

    Args:
        section, call: marks that begin and end all calls, and each of them.
        middle: stands before the arguments.
        head: what stands before ``middle``: the tool's name; its kind, and then the name stands behind ``middle``, before
            arguments in a fence; or an id that holds the name, such as functions.look:0.
    """

    def __init__(
        self,
        name: str,
        section: tuple[str, str],
        call: tuple[str, str],
        middle: str,
        head: Literal["name", "kind", "id"],
    ) -> None:
        self.name = name
        self.section = section
        self.call = call
        self.middle = middle
        self.head = head
        self.openings: tuple[str, ...] = (section[0],)
        self.first = False
        self.marks: tuple[str, ...] = (*section, *call, middle)

    @property
    def shape(self) -> CallShape:
        heads: dict[str, tuple[Step, ...]] = {
            "name": (Slot.NAME, self.middle),
            "kind": ("function", self.middle, Slot.NAME, f"\n{_FENCE}\n"),
            "id": ("functions.", Slot.NAME, ":", Slot.NUMBER, self.middle),
        }
        fence = (f"\n{_FENCE_END}",) if self.head == "kind" else ()
        return CallShape(
            opening=self.section[0],
            call=(self.call[0], *heads[self.head], Slot.ARGUMENTS, *fence, self.call[1]),
            between=(Slot.SPACE,),
            after=(Slot.SPACE, self.section[1]),
        )

    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        while True:
            yield from tape.space()
            if not (yield from tape.accept(self.call[0])):
                yield from tape.expect(self.section[1])
                return
            head, _ = yield from tape.until(self.middle, most=MOST_NAME)
            if self.head == "kind":
                head, _ = yield from tape.until("\n", most=MOST_NAME)
                yield from tape.space()
                yield from tape.accept(_FENCE)
            head = head.strip()
            name = head.rpartition(":")[0].removeprefix("functions.") if self.head == "id" else head
            calls.begin(name, head if self.head == "id" else "")
            calls.end((yield from tape.json()))
            yield from tape.space()
            if self.head == "kind":
                yield from tape.accept(_FENCE_END)
            yield from tape.expect(self.call[1])

    def cut(self, text: str, calls: Calls) -> ToolCall | None:
        begun = calls.begun
        return None if begun is None else ToolCall(begun.name, text.lstrip(), begun.id)

    def call_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}" if self.head == "id" else long_id(name, index)
