"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, SmolLM and others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.tool_formats.interface import Read, ToolCall
from services.tool_formats.raw_json import is_json, members, within_text


class Hermes:
    """Implements ``ToolFormat``."""

    name = "hermes"
    opening = "<tool_call>"
    closing = "</tool_call>"

    def read(self, text: str, schemas: Mapping[str, Any], *, ended: bool) -> Read | None:
        begin = len(self.opening)
        at = text.find(self.closing, begin)
        while at >= 0:
            inner = text[begin:at]
            # An argument's text may hold the mark.
            if not (inner.lstrip().startswith("{") and within_text(inner)):
                return self._judged(inner, at + len(self.closing), schemas)
            at = text.find(self.closing, at + 1)
        # A model may end its turn without closing the envelope.
        return self._judged(text[begin:], len(text), schemas) if ended else None

    def _judged(self, inner: str, end: int, schemas: Mapping[str, Any]) -> Read:
        call = named_call(inner)
        return Read(end, (call,) if call is not None and call.name in schemas else ())


def named_call(text: str) -> ToolCall | None:
    """The call in a JSON object with ``name``, and ``arguments`` or ``parameters``; None: it is none."""
    try:
        found, end = members(text)
        name = json.loads(found.get("name", "null"))
    except ValueError:
        return None
    if text[end:].strip() or not isinstance(name, str):
        return None
    arguments = found.get("arguments", found.get("parameters", "{}"))
    if arguments.startswith('"'):
        # Some models write the object as a text.
        arguments = json.loads(arguments)
        if not is_json(arguments):
            return None
    return ToolCall(name, arguments)
