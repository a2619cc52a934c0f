"""An answer's text and calls as content blocks, and the events that tell of them."""

from __future__ import annotations

from typing import Any

from services.api.http.messages.chat_body import INVALID
from services.api.http.openai.chat_messages import arguments_of
from services.api.http.openai.tool_calls import Delta


class ContentBlocks:
    """The blocks of one answer, as its text is read.

    Args:
        calling: the answer may call tools: white space before a call is not told, as in chats.
    """

    def __init__(self, *, calling: bool) -> None:
        self._calling = calling
        self._blocks: list[dict[str, Any]] = []
        # The call that the last block is; None: it is text.
        self._call: int | None = None
        self._space = ""
        self.calls = 0

    def push(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """The events of what a text adds."""
        return [
            event for delta in deltas for event in (self._text(delta.text) if delta.call is None else self._input(delta))
        ]

    def end(self) -> list[dict[str, Any]]:
        """The last events."""
        told = [] if self.calls else self._told_text(self._space)
        self._space = ""
        return told + self._stop()

    def whole(self) -> list[dict[str, Any]]:
        """The blocks, once the answer has ended."""
        return [_whole(block) for block in self._blocks]

    def _text(self, text: str) -> list[dict[str, Any]]:
        text = self._space + text
        kept = text.rstrip() if self._calling else text
        self._space = text[len(kept) :]
        return self._told_text(kept)

    def _told_text(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        begun = self._begin(None, {"type": "text", "text": ""}) if not self._blocks or self._call is not None else []
        self._blocks[-1]["text"] += text
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def _input(self, delta: Delta) -> list[dict[str, Any]]:
        self._space = ""
        begun = []
        if delta.call != self._call:
            self.calls += 1
            begun = self._begin(delta.call, {"type": "tool_use", "id": delta.id, "name": delta.name, "input": ""})
        self._blocks[-1]["input"] += delta.text
        return begun + ([self._delta({"type": "input_json_delta", "partial_json": delta.text})] if delta.text else [])

    def _begin(self, call: int | None, block: dict[str, Any]) -> list[dict[str, Any]]:
        stopped = self._stop()
        self._call = call
        self._blocks.append(block)
        shown = {**block, "input": {}} if call is not None else dict(block)
        return [*stopped, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": shown}]

    def _stop(self) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if self._blocks else []

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return block
    found = arguments_of(block["input"] or "{}")
    return {**block, "input": found if isinstance(found, dict) else {INVALID: block["input"]}}
