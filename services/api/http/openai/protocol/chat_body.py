"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.api.http.declared import Whole
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyFalse, Refused
from services.api.http.openai.protocol.messages import Message, Tool, ToolChoice
from services.api.http.openai.protocol.shared_body import Kept, SharedBody
from speculation import limits

MAX_TOOLS = 128
_TOOLS = "unset: functions are given as tools"


class ChatBody(SharedBody):
    """A conversation that the model goes on with."""

    messages: list[Message] = Field(
        min_length=1,
        max_length=limits.MAX_MESSAGES,
        description="text; id, cache_control and the like in messages, parts and tools are without effect",
    )
    max_tokens: Kept | None = Field(
        None, ge=-1, le=limits.MAX_TOKENS, description="unset, or -1: what the context leaves; not 0"
    )
    max_completion_tokens: Kept | None = Field(None, ge=-1, le=limits.MAX_TOKENS, description="as max_tokens")
    logprobs: bool | None = Field(None, description="log-probabilities of the answer's tokens")
    top_logprobs: Whole | None = Field(
        None, ge=0, le=limits.MAX_LOGPROBS, description="how many likeliest tokens; where logprobs is true"
    )
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, description="also where the chat template has no place for them (server.tools)"
    )
    tool_choice: ToolChoice | None = Field(None, description="auto where it is unset; without tools, none or auto")
    parallel_tool_calls: bool | None = Field(None, description="false: an answer calls one tool at most")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="what the template does not read is named in x-outrider-ignored (server.unknown_fields)"
    )
    reasoning_effort: str | None = Field(
        None,
        max_length=64,
        description="as an option of the chat template, if it reads it; none, and any other, also as its enable_thinking",
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="low, high: as an option of the chat template, if it reads it; medium: as it is"
    )
    thinking_token_budget: Whole | None = Field(
        None,
        ge=0,
        le=limits.MAX_TOKENS,
        description="most tokens of a thought, where its marks are tokens and the answer has no form; else named in "
        "x-outrider-ignored",
    )
    include_reasoning: bool | None = Field(
        None, description="false: the answer leaves out reasoning_content; the model thinks all the same"
    )
    add_generation_prompt: bool | None = Field(None, description="false: the prompt does not begin the model's turn")
    continue_final_message: bool | None = Field(None, description="the answer goes on within the assistant's last message")

    function_call: Annotated[Literal["none"] | None, NO_EFFECT] = Field(None, description=_TOOLS)
    modalities: Annotated[list[Literal["text"]] | None, NO_EFFECT] = Field(
        None, min_length=1, max_length=1, description="[text]: answers are text"
    )
    documents: Annotated[list[Any] | None, NO_EFFECT] = Field(
        None, max_length=0, description="unset: put documents into a message"
    )
    echo: Annotated[OnlyFalse | None, NO_EFFECT] = Field(None, description="false: the conversation is not repeated")
    add_special_tokens: Annotated[OnlyFalse | None, NO_EFFECT] = Field(
        None, description="false: the chat template writes special tokens itself"
    )
    best_of: Annotated[Whole | None, NO_EFFECT] = Field(None, ge=1, le=1, description="unset or 1: say n")
    functions: Refused = Field(None, description=_TOOLS)
    audio: Refused = Field(None, description="unset: answers are text")
    web_search_options: Refused = Field(None, description="unset: nothing is looked up on the web")
    chat_template: Refused = Field(None, description="unset: templates are programs, which are not taken from requests")
    suffix: Refused = Field(None, description="unset: a conversation is continued at its end")
    prompt: Refused = Field(None, description="unset: say messages, or use /v1/completions")
