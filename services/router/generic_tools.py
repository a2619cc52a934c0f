"""Tools for models whose chat template has no place for them: written into plain messages, in the form of Hermes' models.

The tools stand in the system message; a call is text of the assistant; a tool's answer is a message of the user. Models that
were not trained for this may call badly, or never.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

# The form in which the instructions ask for calls, a name in ``services.tool_formats``.
FORMAT = "hermes"

_INSTRUCTIONS = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, system: bool) -> list[dict[str, Any]]:
    """Messages whose system message says what tools there are; the first one, where there is no such role."""
    said = _INSTRUCTIONS.format(tools="\n".join(map(_json, tools)))
    shown = [dict(message) for message in messages]
    if shown[0]["role"] == "system":
        shown[0]["content"] = f"{shown[0]['content']}\n\n{said}".lstrip()
        return shown
    if not system:
        shown[0]["content"] = f"{said}\n\n{shown[0]['content']}"
        return shown
    return [{"role": "system", "content": said}, *shown]


def calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which calls, and what tools have answered, are text. Answers in a row are one message."""
    shown: list[dict[str, Any]] = []
    for answers, run in groupby(messages, lambda message: message["role"] == "tool"):
        if answers:
            told = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in run]
            shown.append({"role": "user", "content": "\n".join(told)})
            continue
        for message in run:
            entry = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
            calls = [f"<tool_call>\n{_called(call['function'])}\n</tool_call>" for call in message.get("tool_calls", ())]
            if calls:
                entry["content"] = "\n".join([entry["content"], *calls]).lstrip("\n")
            shown.append(entry)
    return shown


def _called(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    # Arguments that are no object stay the text that they are.
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'{{"name": {_json(function["name"])}, "arguments": {written}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
