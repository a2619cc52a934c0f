"""What a chat template reads, found by rendering examples with it. Words in its source would say little."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from services.router.templates import ChatTemplate
from services.tool_formats import harmony
from services.tool_formats.answer_text import AnswerText
from services.tool_formats.catalogue import NAMES, THOUGHTS
from services.tool_formats.marks import Marks

_NAME, _ARGUMENTS = "find_place", {"place": "Bern", "near": True}
_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}, "near": {"type": "boolean"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Finds a place.", "parameters": _SCHEMA}}
_ASKED = {"role": "user", "content": "Where is Bern?"}
# Nine letters and digits, which is what Mistral's templates take; and what Kimi's write in place of the name.
_IDS = ("abcdef123", f"functions.{_NAME}:0")
_CUT = '{"place": "Be'
# Where templates read thoughts: under a name of the message, or in its content, as Mistral's do.
_PART, _PART_OF_TEXTS = "content[].thinking", "content[].thinking[].text"
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", _PART, _PART_OF_TEXTS)
_THOUGHT = "Outrider7thought"
# Of messages that may have a name; a tool's says which call it answers.
_ROLES = ("system", "developer", "user", "assistant")
_CALLED_SO = "Outrider7name"


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateTraits:
    """What there is a place for.

    Attributes:
        system: a message of the role system.
        late_system: one behind other messages.
        tools: the tools that may be called.
        calls: calls in the assistant's messages.
        tool_format: the form in which it writes a call and its reader reads that call back; empty: none.
        text_arguments: it reads the arguments of calls as a text.
        cut_arguments: it writes arguments that are no JSON, as those of a call that was cut short, as they are.
        thought_field: where it reads what the assistant thought, as ``with_thought`` has it; empty: it does not.
        named_roles: those whose messages it shows with the name of who said them.
    """

    system: bool
    late_system: bool
    tools: bool
    calls: bool
    tool_format: str
    text_arguments: bool
    cut_arguments: bool
    thought_field: str
    named_roles: tuple[str, ...]


def traits_of(template: ChatTemplate) -> TemplateTraits:
    """The traits of a template."""
    begun = _rendered(template, tools=True, begun=True)
    tools = begun is not None and begun != _rendered(template, tools=False, begun=True)
    without = _rendered(template, {"role": "assistant", "content": ""}, tools=tools)
    calls, form, as_text = False, "", False
    for text_arguments in (False, True):
        for call_id in _IDS:
            arguments = json.dumps(_ARGUMENTS) if text_arguments else _ARGUMENTS
            whole = _rendered(template, _called(call_id, arguments), tools=tools)
            if whole is None or whole == without or form:
                continue
            calls, as_text = True, text_arguments
            form = _form_of(begun, whole) if tools and begun is not None else ""
        if calls:
            break
    return TemplateTraits(
        system=_takes_system(template),
        late_system=_NAME in (_rendered(template, {"role": "system", "content": _NAME}, tools=False) or ""),
        tools=tools,
        calls=calls,
        tool_format=form,
        text_arguments=as_text,
        cut_arguments=any(_rendered(template, _called(call_id, _CUT), tools=tools) is not None for call_id in _IDS),
        thought_field=_thought_field(template),
        named_roles=tuple(role for role in _ROLES if _shows_names(template, role)),
    )


def thoughts_of(template: ChatTemplate, added: Collection[str]) -> str:
    """How a model marks its thoughts, a name in ``THOUGHTS``, by its template or its tokenizer's added tokens; empty: it
    does not.
    """
    if template.holds(harmony.CHANNEL) and template.holds(harmony.MESSAGE):
        return harmony.NAME
    pairs = {name: pair for name, pair in THOUGHTS.items() if name != harmony.NAME}
    shown = next((name for name, (_, end) in pairs.items() if template.holds(end)), "")
    return shown or next((name for name, pair in pairs.items() if all(mark in added for mark in pair)), "")


def _called(call_id: str, arguments: Any) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _thought_field(template: ChatTemplate) -> str:
    """Of an answer, or of a call that was answered: some templates show the thoughts of one of them alone."""
    for field in _THOUGHT_FIELDS:
        said = with_thought({"role": "assistant", "content": "Here."}, field, _THOUGHT)
        answered = {"role": "tool", "content": "Here.", "tool_call_id": _IDS[0], "name": _NAME}
        for more in ([said], [with_thought(_called(_IDS[0], _ARGUMENTS), field, _THOUGHT), answered]):
            text = _rendered(template, *more, tools=True) or _rendered(template, *more, tools=False) or ""
            # A list that is written as it is has not been read.
            if _THOUGHT in text and not any(mark + _THOUGHT + mark in text for mark in "'\""):
                return field
    return ""


def with_thought(message: dict[str, Any], field: str, thought: str) -> dict[str, Any]:
    """A message of the assistant with what it thought where a template reads it."""
    if field not in (_PART, _PART_OF_TEXTS):
        return {**message, field: thought}
    part = {"type": "thinking", "thinking": thought if field == _PART else [{"type": "text", "text": thought}]}
    said = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [part, *said]}


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


def _shows_names(template: ChatTemplate, role: str) -> bool:
    said = {"role": role, "content": "Here.", "name": _CALLED_SO}
    # Some templates take turns of user and assistant alone, and a system message as the first alone.
    messages = {"user": [said], "assistant": [_ASKED, said]}.get(role, [said, _ASKED])
    try:
        return _CALLED_SO in template.render(messages)
    except TemplateError:
        return False


def _form_of(begun: str, whole: str) -> str:
    """The form of the call in ``whole``, which the assistant says behind what ``begun`` shows as well."""
    said = whole[next((at for at, (a, b) in enumerate(zip(begun, whole, strict=False)) if a != b), len(begun)) :]
    left = {name: rest for name in NAMES if (rest := _left(name, said)) is not None}
    # Of forms that read the call, the one that leaves least of the text.
    return min(left, key=lambda name: left[name]) if left else ""


def _left(form: str, said: str) -> int | None:
    """Characters of the text that a form's reader takes for no part of the call; None: it does not read the call."""
    reader = AnswerText(Marks(), form=form, schemas={_NAME: _SCHEMA})
    parts = [*reader.push(said), *reader.finish(cut=False)]
    calls = [part.call for part in parts if part.call is not None]
    if len(calls) != 1 or calls[0].name != _NAME or json.loads(calls[0].arguments) != _ARGUMENTS:
        return None
    return sum(len(part.text) for part in parts)
