"""A body's ``messages`` as the turns of a conversation."""

from __future__ import annotations

import json
import math
from typing import Any

from services.api.http.openai.fields import WITHOUT_EFFECT, Fields, fields_of
from services.api.http.openai.protocol import messages
from services.api.http.openai.protocol.marks import words_of
from services.api.http.openai.shared_fields import text_of
from services.api.messages import ChatMessage
from speculation import limits

# Fields of our own answers that ask for nothing, so that an answer can be sent back as it came.
_EMPTY = ("refusal", "audio", "function_call", "annotations")


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """The conversation. ``developer``, OpenAI's newer word, is the templates' ``system``.

    Raises:
        Refused: there is none, or a message is none; names the message and its field.
    """
    listed = fields.listed("messages")
    if listed is None:
        raise fields.refuse("messages", "unset", "a list of messages", "missing_required_parameter")
    if not 1 <= len(listed) <= limits.MAX_MESSAGES:
        raise fields.refuse("messages", f"{len(listed)} messages", f"1 to {limits.MAX_MESSAGES} messages")
    return tuple(_message(fields_of(entry, messages.Message, f"messages[{index}]")) for index, entry in enumerate(listed))


def _message(fields: Fields) -> ChatMessage:
    role = fields.one_of("role")
    if role is None:
        roles = ", ".join(words_of(messages.Message, "role"))
        raise fields.refuse("role", "unset", f"one of {roles}", "missing_required_parameter")
    calls = _calls(fields) if role == "assistant" else ""
    given, content = fields.given("content"), fields.take("content")
    if not given and not calls:
        raise fields.refuse("content", "unset", "a text, or a list of parts of type text", "missing_required_parameter")
    call_id = fields.text("tool_call_id") if role == "tool" else ""
    if call_id is None:
        raise fields.refuse("tool_call_id", "unset", "the id of the call that is answered", "missing_required_parameter")
    name = fields.text("name")
    reasoning = _reasoning(fields)
    for key in _EMPTY:
        if (value := fields.take(key)) not in (None, [], ""):
            raise fields.refuse(key, value if isinstance(value, str) else "set", "unset", "unsupported_parameter")
    for key in WITHOUT_EFFECT:
        fields.take(key)
    fields.end()
    return ChatMessage(
        role="system" if role == "developer" else role,
        content="" if content is None else text_of(content, fields.name("content")),
        name=name or "",
        tool_calls=calls,
        tool_call_id=call_id,
        reasoning=reasoning,
    )


def _reasoning(fields: Fields) -> str:
    """What the assistant thought, by its older or its newer name."""
    older, newer = fields.text("reasoning_content") or "", fields.text("reasoning") or ""
    if older and newer and older != newer:
        raise fields.refuse("reasoning", newer, "unset, or as reasoning_content")
    return older or newer


def _calls(fields: Fields) -> str:
    """Earlier calls of tools, as templates expect them: their arguments are objects, where they can be."""
    listed = fields.listed("tool_calls")
    if not listed:
        return ""
    calls = [
        _call(fields_of(entry, messages.Call, f"{fields.name('tool_calls')}[{index}]")) for index, entry in enumerate(listed)
    ]
    return json.dumps(calls, ensure_ascii=False)


def _call(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {"id": fields.text("id"), "type": fields.one_of("type") or "function"}
    for key in WITHOUT_EFFECT:
        fields.take(key)
    function = fields.below("function", messages.CalledFunction)
    if function is None:
        raise fields.refuse("function", "unset", "an object", "missing_required_parameter")
    name, arguments = function.text("name"), function.text("arguments")
    if not name:
        raise function.refuse("name", "unset", "the name of a function", "missing_required_parameter")
    function.end()
    fields.end()
    return {**found, "function": {"name": name, "arguments": arguments_of(arguments or "{}")}}


def arguments_of(text: str) -> Any:
    """An object as templates read it; or the text itself, where it is none (a call may have been cut short) or where a
    template could not write it as it was.
    """
    try:
        found = json.loads(text, parse_float=_finite, parse_constant=_finite)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value
