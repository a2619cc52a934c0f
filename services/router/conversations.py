"""A conversation and its options as a chat template reads them. Options that the template would not read are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.api.messages import ChatMessage, ChatOptions
from services.router.templates import ChatTemplate
from speculation import limits
from speculation.errors import InvalidArgument

# Names that a template has already, or that other fields of a request set.
_TAKEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check what holds for every template.

    Raises:
        InvalidArgument: no messages, too many, or one without a role.
    """
    if not 1 <= len(messages) <= limits.MAX_MESSAGES:
        raise InvalidArgument("messages", f"{len(messages)} messages", f"1 to {limits.MAX_MESSAGES} messages")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidArgument(f"messages[{index}].role", "empty", "a role, such as user")


def as_dicts(messages: Sequence[ChatMessage], template: ChatTemplate) -> list[dict[str, Any]]:
    """The messages with the names that templates know.

    Raises:
        InvalidArgument: a message carries what the template does not read; names it.
    """
    shown = []
    for index, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        # A tool's message says which tool it comes from; templates go by the order instead.
        if message.name:
            _check(template.reads("name") or message.role == "tool", f"messages[{index}].name", message.name, "names")
            entry["name"] = message.name
        if message.tool_calls:
            _check(template.reads("tool_calls"), f"messages[{index}].tool_calls", "set", "calls of tools")
            entry["tool_calls"] = json.loads(message.tool_calls)
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        shown.append(entry)
    return shown


def template_options(options: ChatOptions, template: ChatTemplate) -> dict[str, Any]:
    """What the template is given beside the messages.

    Raises:
        InvalidArgument: tools, or an option, that the template does not read.
    """
    given: dict[str, Any] = {"add_generation_prompt": options.add_generation_prompt}
    if options.tools:
        _check(template.reads("tools"), "tools", "set", "tools")
        given["tools"] = json.loads(options.tools)
    extra: Mapping[str, Any] = json.loads(options.template_kwargs) if options.template_kwargs else {}
    for name, value in extra.items():
        field = f"chat_template_kwargs.{name}"
        if name in _TAKEN or name not in template.variables:
            free = ", ".join(sorted(template.variables - {*_TAKEN})) or "none"
            raise InvalidArgument(field, value, f"unset: of such options, this model's chat template reads: {free}")
        given[name] = value
    return given


def _check(read: bool, field: str, value: str, what: str) -> None:
    if not read:
        raise InvalidArgument(field, value, f"unset: this model's chat template has no place for {what}")
