"""What a chat template reads, found by having it render: a word in its source says little."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateTraits:
    """What there is a place for.

    Attributes:
        system: a message of the role system.
        tools: the tools that may be called.
        calls: calls in the assistant's messages.
        tool_format: the form in which it writes a call and its reader reads that call back; empty: none.
    """

    system: bool
    tools: bool
    calls: bool
    tool_format: str


def traits_of(template: ChatTemplate) -> TemplateTraits:
    """The traits of a template."""
    begun = _rendered(template, tools=True, begun=True)
    tools = begun is not None and begun != _rendered(template, tools=False, begun=True)
    whole = _rendered(template, _CALLS, tools=tools)
    calls = whole is not None and whole != _rendered(template, {"role": "assistant", "content": ""}, tools=tools)
    form = _form_of(begun, whole) if calls and begun is not None and whole is not None else ""
    return TemplateTraits(system=_takes_system(template), tools=tools, calls=calls, tool_format=form if tools else "")


def _rendered(template: ChatTemplate, *more: dict[str, Any], tools: bool, begun: bool = False) -> str | None:
    options: dict[str, Any] = {"add_generation_prompt": begun, **({"tools": [_TOOL]} if tools else {})}
    try:
        return template.render([_ASKED, *more], options)
    except TemplateError:
        return None


def _takes_system(template: ChatTemplate) -> bool:
    try:
        return _NAME in template.render([{"role": "system", "content": _NAME}, _ASKED])
    except TemplateError:
        return False


def _form_of(begun: str, whole: str) -> str:
    """The form of the call in ``whole``, which the assistant says behind what ``begun`` shows as well."""
    said = whole[next((at for at, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), len(begun)) :]
    return next((name for name, form in FORMATS.items() if _reads(form, said)), "")


def _reads(form: ToolFormat, said: str) -> bool:
    at = said.find(form.opening)
    read = None if at < 0 else form.read(said[at:], {_NAME: _SCHEMA}, ended=True)
    if read is None or len(read.calls) != 1:
        return False
    call = read.calls[0]
    return call.name == _NAME and bool(json.loads(call.arguments) == _ARGUMENTS)
