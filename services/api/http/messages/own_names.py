"""Errors of the rules of chats, with the names that the fields have in Anthropic's body."""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.api.http.openai.errors import renamed
from speculation.errors import InvalidArgument, spelled

_PARALLEL = "parallel_tool_calls"
_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "tool_choice.function.name": "tool_choice.name",
    _PARALLEL: "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
}
_TURN = re.compile(r"messages\[(\d+)\]")
_TOOL = re.compile(r"(tools\[\d+\])\.function\.(\w+)")
# What is called otherwise in what is allowed.
_WORDS = {"required or a function's name": "any or tool", "tool_choice is auto": "tool_choice is auto, or unset,"}


def own_name(field: str, paths: Sequence[str]) -> str:
    """A field's name in Anthropic's body.

    Args:
        field: its name in the chat's body.
        paths: where the content of each of the chat's messages stands.
    """
    if (turn := _TURN.match(field)) is not None:
        index = int(turn[1])
        return paths[index] if index < len(paths) else "messages"
    if (tool := _TOOL.match(field)) is not None:
        return f"{tool[1]}.{'input_schema' if tool[2] == 'parameters' else tool[2]}"
    known = next((name for name in _NAMES if field == name or field.startswith((f"{name}.", f"{name}["))), None)
    return field if known is None else _NAMES[known] + field[len(known) :]


def in_own_names(error: InvalidArgument, paths: Sequence[str]) -> InvalidArgument:
    """The same error, with the body's own name of the field."""
    allowed, value = error.allowed, spelled(error.value != spelled(True)) if error.field == _PARALLEL else None
    for word, own in _WORDS.items():
        allowed = allowed.replace(word, own)
    return renamed(error, own_name(error.field, paths), value=value, allowed=allowed)
