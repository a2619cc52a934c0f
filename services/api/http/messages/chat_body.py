"""Anthropic's body as the body of a chat that says the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.api.http.declared import Declared, read_declared
from services.api.http.harmless import honoured
from services.api.http.messages import unhonoured
from services.api.http.messages.protocol import (
    BLOCKS_OF,
    CallableTool,
    CountBody,
    FieldsOfChat,
    MessagesBody,
    SaidMessage,
    SaidText,
    SaidThinking,
    ToolAnswer,
    ToolChoiceOf,
    UsedTool,
)
from services.api.http.openai.errors import Refused

# The member of an input that holds arguments that are no object, as Anthropic suggests for what is sent back.
INVALID = "INVALID_JSON"
_SENT_BACK = "at the end of the conversation, the answer of the tool, or text that the answer goes on with"
Kind = Literal["user", "assistant", "system", "tool"]


@dataclass(kw_only=True, slots=True)
class ChatTurn:
    """A message of a chat: its texts, thoughts and calls, and where its content stands in Anthropic's body."""

    role: str
    path: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: str | None = None

    def as_message(self) -> dict[str, Any]:
        """As in the body of a chat."""
        said: dict[str, Any] = {"role": self.role, "content": "\n".join(self.texts)}
        if self.thoughts:
            said["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            said["tool_calls"] = self.calls
        return said if self.answers is None else {**said, "tool_call_id": self.answers}


class ChatTurns:
    """The messages of a chat."""

    def __init__(self) -> None:
        self.turns: list[ChatTurn] = []

    def of(self, role: str, path: str) -> ChatTurn:
        """The turn of who speaks: the last one, where it is theirs, or a new one."""
        if role not in ("user", "assistant") or not self.turns or self.turns[-1].role != role:
            self.turns.append(ChatTurn(role=role, path=path))
        return self.turns[-1]


def turns_of(body: CountBody) -> ChatTurns:
    """The conversation.

    Raises:
        Refused: a block is none that is read here; names it.
    """
    turns = ChatTurns()
    if body.system and (text := _text(body.system, "system")):
        turns.of("system", "system").texts.append(text)
    for index, message in enumerate(body.messages):
        if message.role == "assistant" and index == len(body.messages) - 1 and _is_empty(message):
            # As Anthropic has it, an empty last message of the assistant asks for nothing.
            break
        _add(turns, message, f"messages[{index}].content")
    return turns


def chat_body_of(body: CountBody, turns: ChatTurns) -> dict[str, Any]:
    """The body for /v1/chat/completions.

    Raises:
        Refused: fields do not fit together; names one.
    """
    chat: dict[str, Any] = {"model": body.model, "messages": [turn.as_message() for turn in turns.turns]}
    last = turns.turns[-1] if turns.turns else None
    if last is not None and last.role == "assistant":
        if last.calls:
            raise Refused(last.path, "a tool_use", f"a tool_result behind it: {_SENT_BACK}")
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    chat |= _choice(body.tool_choice)
    if body.output_config is not None:
        chat["reasoning_effort"] = body.output_config.effort
        if (form := body.output_config.format) is not None:
            schema = {"name": "answer", "schema": form.json_schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    if isinstance(body, MessagesBody):
        # No answer is one token that is not told.
        chat |= {"max_tokens": body.max_tokens or 1, "stream": body.stream, "stop": body.stop_sequences}
        if body.thinking is not None and body.thinking.type == "enabled":
            chat["thinking_token_budget"] = body.thinking.budget_tokens
        chat |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        chat |= {name: getattr(body, name) for name in FieldsOfChat.model_fields}
    return {name: value for name, value in chat.items() if value is not None}


def _add(turns: ChatTurns, message: SaidMessage, path: str) -> None:
    if not message.content:
        turns.of(message.role, path)
    for index, entry in enumerate(message.content):
        named = f"{path}[{index}]"
        block = _block(entry, BLOCKS_OF[message.role], named, message.role)
        if isinstance(block, ToolAnswer):
            answer = turns.of("tool", f"{named}.content")
            answer.answers = block.tool_use_id
            answer.texts.append(_answer(block, f"{named}.content"))
            continue
        turn = turns.of(message.role, path)
        if isinstance(block, SaidText):
            turn.texts.append(block.text)
        elif isinstance(block, SaidThinking):
            turn.thoughts.append(block.thinking)
        elif isinstance(block, UsedTool):
            turn.calls.append(_call(block))


def _block(entry: dict[str, Any], kinds: Mapping[str, type[Declared]], path: str, role: str) -> Declared:
    kind = entry.get("type")
    known = kinds.get(kind) if isinstance(kind, str) else None
    if known is None:
        shown = kind if isinstance(kind, str) and kind else "unset"
        allowed = f"one of {', '.join(kinds)} in a message of the role {role}: the model reads text alone"
        raise Refused(f"{path}.type", shown, allowed, "unsupported_value")
    return read_declared(known, honoured(entry, unhonoured.BLOCK, path), path)


def _text(blocks: Sequence[dict[str, Any]], path: str) -> str:
    """The text of blocks that are all text."""
    read = [_block(entry, BLOCKS_OF["system"], f"{path}[{index}]", "system") for index, entry in enumerate(blocks)]
    return "\n".join(block.text for block in read if isinstance(block, SaidText))


def _is_empty(message: SaidMessage) -> bool:
    return all(block.get("type") == "text" and block.get("text") == "" for block in message.content)


def _answer(block: ToolAnswer, path: str) -> str:
    text = _text(block.content, path)
    return f"Error: {text}" if block.is_error else text


def _call(block: UsedTool) -> dict[str, Any]:
    kept = block.input.get(INVALID) if len(block.input) == 1 else None
    arguments = kept if isinstance(kept, str) else json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool(tool: CallableTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoiceOf | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        allowed = "the name of a tool where type is tool" if choice.name is None else "unset where type is not tool"
        raise Refused("tool_choice.name", choice.name or "unset", allowed)
    chosen: Any = {"any": "required"}.get(choice.type, choice.type)
    if choice.type == "tool":
        chosen = {"type": "function", "function": {"name": choice.name}}
    disabled = choice.disable_parallel_tool_use
    return {"tool_choice": chosen, "parallel_tool_calls": None if disabled is None else not disabled}
