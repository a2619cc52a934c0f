"""What /v1/messages and /v1/messages/count_tokens answer, whole and in events, and errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel


class TextReply(BaseModel):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingReply(BaseModel):
    """What the model thought first."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseReply(BaseModel):
    """A call of a tool. An input that is no object, such as one cut short, stands as text in ``INVALID_JSON``."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class TokensOfAnswer(BaseModel):
    """Of the answer's tokens."""

    thinking_tokens: int


class CountedTokens(BaseModel):
    """Tokens of the prompt, those found in the cache apart, and of the answer."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: TokensOfAnswer


class MessageReply(BaseModel):
    """The answer as a whole. What is beyond Anthropic's fields is as in /v1/chat/completions."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextReply | ThinkingReply | ToolUseReply, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: CountedTokens
    seed: int
    metrics: dict[str, Any]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class BegunMessage(MessageReply):
    """The message as it is before any text."""

    stop_reason: None  # type: ignore[assignment]
    seed: None = None  # type: ignore[assignment]
    metrics: None = None  # type: ignore[assignment]


class MessageStart(BaseModel):
    """The first event."""

    type: Literal["message_start"]
    message: BegunMessage


class BlockStart(BaseModel):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: Annotated[TextReply | ThinkingReply | ToolUseReply, Field(discriminator="type")]


class AddedText(BaseModel):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class AddedThinking(BaseModel):
    """More of a thought."""

    type: Literal["thinking_delta"]
    thinking: str


class AddedInput(BaseModel):
    """More of a call's input, as the model wrote it."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(BaseModel):
    """More of the last block; events are filled up with ``obfuscation``."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[AddedText | AddedThinking | AddedInput, Field(discriminator="type")]
    obfuscation: str | None = None


class BlockStop(BaseModel):
    """A block has ended."""

    type: Literal["content_block_stop"]
    index: int


class StopOf(BaseModel):
    """Why the message ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """The message has ended."""

    type: Literal["message_delta"]
    delta: StopOf
    usage: CountedTokens
    seed: int
    metrics: dict[str, Any]


class MessageStop(BaseModel):
    """The last event."""

    type: Literal["message_stop"]


class Ping(BaseModel):
    """The server still works on it."""

    type: Literal["ping"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of an answer; its name is its type."""


class CountReply(BaseModel):
    """Of /v1/messages/count_tokens."""

    input_tokens: int


class ErrorDetails(BaseModel):
    """The same for programs: a code, and the field that is at fault."""

    error_code: str | None
    param: str | None


class MessageError(BaseModel):
    """What is wrong."""

    type: str
    message: str
    details: ErrorDetails


class MessageErrorReply(BaseModel):
    """The body of every answer that is an error; also the last event of a stream that fails."""

    type: Literal["error"]
    error: MessageError
    request_id: str
