"""The messages of Ollama's chats, as those of a chat that says the same."""

from __future__ import annotations

import json
from typing import Any

from services.api.http.ollama.protocol import TEXT_ALONE, SaidCall, SaidMessage
from services.api.http.openai.errors import Refused


def chat_messages(said: list[SaidMessage]) -> list[dict[str, Any]]:
    """The messages, each in its place. Calls get ids where the client has not kept them.

    Raises:
        Refused: one has images, or answers no call; names it.
    """
    messages: list[dict[str, Any]] = []
    # The functions of calls that are not yet answered, by the calls' ids.
    waiting: dict[str, str] = {}
    for index, each in enumerate(said):
        check_unset(f"messages[{index}].images", each.images, TEXT_ALONE)
        message: dict[str, Any] = {"role": each.role, "content": each.content or ""}
        if each.role == "tool":
            message["tool_call_id"] = _answered(each, waiting, f"messages[{index}]")
        if each.name is not None:
            message["name"] = each.name
        if each.thinking:
            message["reasoning_content"] = each.thinking
        if each.tool_calls:
            calls = [_call(call, f"call_{index}_{place}") for place, call in enumerate(each.tool_calls)]
            waiting = {call["id"]: call["function"]["name"] for call in calls}
            message["tool_calls"] = calls
        messages.append(message)
    return messages


def _call(said: SaidCall, name: str) -> dict[str, Any]:
    function = {"name": said.function.name, "arguments": json.dumps(said.function.arguments, ensure_ascii=False)}
    return {"id": said.id or name, "type": "function", "function": function}


def check_unset(name: str, value: Any, allowed: str) -> None:
    """Refuse a field that asks for what is not there."""
    if value:
        raise Refused(name, "set", allowed, "unsupported_parameter")


def _answered(message: SaidMessage, waiting: dict[str, str], path: str) -> str:
    """The call that a tool's message answers, which no other one does."""
    if message.tool_call_id is not None:
        # Of one that nothing has called, the chat says what is wrong with it.
        waiting.pop(message.tool_call_id, None)
        return message.tool_call_id
    for call, name in waiting.items():
        if message.tool_name in (None, name):
            del waiting[call]
            return call
    raise Refused(
        f"{path}.tool_name", message.tool_name or "unset", "a function that is called before it, and not yet answered"
    )
