"""An answer's thoughts, text and calls as content blocks, and the events that tell of them."""

from __future__ import annotations

from typing import Any

from services.api.http.messages.chat_body import INVALID
from services.api.http.openai.answer_reader import Delta
from services.api.http.openai.chat_messages import arguments_of


class ContentBlocks:
    """The blocks of one answer, as it is read."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        # What was added to each, in pieces.
        self._added: list[list[str]] = []
        # What the last block is of: the text, a thought, or which call.
        self._last: tuple[bool, int | None] | None = None

    def push(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """The events of what a text adds."""
        return [event for delta in deltas for event in self._told(delta)]

    def end(self) -> list[dict[str, Any]]:
        """The last events."""
        return self._stop()

    def whole(self) -> list[dict[str, Any]]:
        """The blocks, once the answer has ended."""
        return [_whole(block, "".join(added)) for block, added in zip(self._blocks, self._added, strict=True)]

    def _told(self, delta: Delta) -> list[dict[str, Any]]:
        told = []
        if self._last != (delta.thought, delta.call):
            told = [
                *self._stop(),
                {"type": "content_block_start", "index": len(self._blocks), "content_block": _begun(delta)},
            ]
            self._blocks.append(_begun(delta))
            self._added.append([])
            self._last = (delta.thought, delta.call)
        if delta.text:
            self._added[-1].append(delta.text)
            added = _delta(self._blocks[-1], delta.text)
            told.append({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": added})
        return told

    def _stop(self) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if self._blocks else []


def _begun(delta: Delta) -> dict[str, Any]:
    if delta.call is not None:
        return {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
    # Thoughts are not signed: they may be sent back as they are.
    return {"type": "thinking", "thinking": "", "signature": ""} if delta.thought else {"type": "text", "text": ""}


# What a block's pieces are called in events, and all of them in the block itself.
_PIECES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _delta(block: dict[str, Any], text: str) -> dict[str, Any]:
    """The delta of more text in a block."""
    kind, key = _PIECES[block["type"]]
    return {"type": kind, key: text}


def _whole(block: dict[str, Any], text: str) -> dict[str, Any]:
    """A block with all that was added to it."""
    if block["type"] != "tool_use":
        return {**block, _PIECES[block["type"]][1]: text}
    found = arguments_of(text or "{}")
    return {**block, "input": found if isinstance(found, dict) else {INVALID: text}}
