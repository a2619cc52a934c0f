"""Finds how a chat template writes calls of tools: by having it write one."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import TemplateError

from services.router.templates import ChatTemplate
from services.tool_formats.catalogue import FORMATS
from services.tool_formats.interface import ToolFormat

_NAME, _ARGUMENTS = "find_place", {"place": "Bern", "near": True}
_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}, "near": {"type": "boolean"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Finds a place.", "parameters": _SCHEMA}}
# Nine letters and digits, which is what Mistral's templates take.
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_ASKED = {"role": "user", "content": "Where is Bern?"}


def format_of(template: ChatTemplate) -> str:
    """The name of the form in which the template writes a call, if its reader reads that call back; else empty."""
    if not template.reads("tools"):
        return ""
    answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    try:
        begun = template.render([_ASKED], {"tools": [_TOOL], "add_generation_prompt": True})
        whole = template.render([_ASKED, answer], {"tools": [_TOOL], "add_generation_prompt": False})
    except TemplateError:
        return ""
    said = whole[next((at for at, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), len(begun)) :]
    return next((name for name, form in FORMATS.items() if _reads(form, said)), "")


def _reads(form: ToolFormat, said: str) -> bool:
    at = said.find(form.opening)
    read = None if at < 0 else form.read(said[at:], {_NAME: _SCHEMA}, ended=True)
    if read is None or len(read.calls) != 1:
        return False
    call = read.calls[0]
    found: Any = json.loads(call.arguments)
    return call.name == _NAME and bool(found == _ARGUMENTS)
