"""The bodies of /v1/messages and /v1/messages/count_tokens, each field declared once.

The blocks of a content are declared by type, and read one by one (``chat_body``): so an error names the block's own field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from services.api.http.declared import Declared, Whole
from speculation import limits

_MOST_OF_ID = 256
Name = Annotated[str, Field(min_length=1, max_length=_MOST_OF_ID)]
# Anthropic's range; others go up to 2.
Share = Annotated[float, Field(ge=0, le=1)]


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class SaidText(Declared):
    """A block of text."""

    type: Literal["text"]
    text: str


class SaidThinking(Declared):
    """What the model thought before it answered. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class UsedTool(Declared):
    """A call of a tool that the model has made."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


Blocks = Annotated[list[dict[str, Any]], BeforeValidator(_as_blocks, json_schema_input_type=str | list[SaidText])]


class ToolAnswer(Declared):
    """What a tool has answered; with ``is_error``, the model reads it behind ``Error:``."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Blocks = Field(default_factory=list)
    is_error: bool | None = None


AnyBlocks = Annotated[
    list[dict[str, Any]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[SaidText | SaidThinking | UsedTool | ToolAnswer]),
]
# The blocks that a message of each role may have, by type.
BLOCKS_OF: Mapping[str, Mapping[str, type[Declared]]] = {
    "user": {"text": SaidText, "tool_result": ToolAnswer},
    "assistant": {"text": SaidText, "thinking": SaidThinking, "tool_use": UsedTool},
    "system": {"text": SaidText},
}


class SaidMessage(Declared):
    """A message. Those in a row of one role are one turn; a last one of the assistant is gone on with."""

    role: Literal["user", "assistant", "system"]
    content: AnyBlocks


class CallableTool(Declared):
    """A tool that the client runs; of Anthropic's own tools there is none."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="a JSON schema of its input")
    strict: bool | None = Field(
        None, description="true: its input follows the schema also where the model is free to call it"
    )


class ToolChoiceOf(Declared):
    """Whether tools are called: auto: as the model likes; any: at least one; tool: this one; none: no tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="of type tool alone")
    disable_parallel_tool_use: bool | None = Field(None, description="true: an answer calls one tool at most")


class Thinking(Declared):
    """Whether the model thinks first, as an option of the chat template, if it reads one."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(None, ge=1, description="as thinking_token_budget of chats")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="summarized: thoughts are shown as they are; omitted: not at all"
    )


class SchemaOfAnswer(Declared):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Declared):
    """How long the model thinks, and the form of its answer."""

    effort: str | None = Field(None, max_length=64, description="as the chat template's reasoning_effort, if it reads it")
    format: SchemaOfAnswer | None = None


class FieldsOfChat(Declared):
    """Fields that Anthropic's API does not have; each as in /v1/chat/completions."""

    seed: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    ignore_generation_config: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    skip_special_tokens: Any = None
    structured_outputs: Any = None
    prediction: Any = None
    speculation: Any = None
    stream_interval: Any = None
    privacy: Any = None
    cache_salt: Any = None
    priority: Any = None
    return_token_ids: Any = None
    request_id: Any = None


class CountBody(Declared):
    """A conversation whose tokens are counted."""

    model: str | None = Field(None, description="one of the served names; unset: the first")
    messages: list[SaidMessage]
    system: Blocks | None = None
    tools: list[CallableTool] | None = None
    tool_choice: ToolChoiceOf | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Any = Field(None, description="as in /v1/chat/completions")


class MessagesBody(CountBody, FieldsOfChat):
    """A conversation that the model goes on with."""

    max_tokens: Whole = Field(
        ge=0, le=limits.MAX_TOKENS, description="the most; what the context leaves where that is less. 0: no answer"
    )
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Whole | None = Field(None, ge=-1, le=limits.TOP_K[1], description="-1 and 0: all")
