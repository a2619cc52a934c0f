"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.api.http.declared import Declared
from services.api.http.openai.protocol.chat_body import MAX_TOOLS
from services.api.http.openai.protocol.completion_body import PromptsOfTokens, Tokens
from services.api.http.openai.protocol.marks import TokenId
from services.api.http.openai.protocol.messages import Message, Tool, ToolChoice
from services.api.http.openai.protocol.parts import Filled
from speculation import limits

OnePrompt = Annotated[list[Filled], Field(min_length=1, max_length=1)]
OnePromptOfTokens = Annotated[PromptsOfTokens, Field(max_length=1)]
_OF_MESSAGES = "of a conversation"


class TokenizeBody(Declared):
    """A text, or a conversation as it is sent to the model: prompt or messages."""

    model: str | None = Field(None, description="one of the served names; unset: the first")
    prompt: Filled | Tokens | OnePrompt | OnePromptOfTokens | None = Field(None, description="one prompt, not with messages")
    messages: list[Message] | None = Field(
        None, min_length=1, max_length=limits.MAX_MESSAGES, description="as in /v1/chat/completions"
    )
    return_token_strs: bool | None = Field(None, description="each token's text as well")
    add_special_tokens: bool | None = Field(None, description="of a text; unset: true, as for generation")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description=_OF_MESSAGES)
    tool_choice: ToolChoice | None = Field(None, description=_OF_MESSAGES)
    parallel_tool_calls: bool | None = Field(None, description=_OF_MESSAGES)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=_OF_MESSAGES)
    reasoning_effort: str | None = Field(None, max_length=64, description=_OF_MESSAGES)
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=_OF_MESSAGES)
    add_generation_prompt: bool | None = Field(None, description=_OF_MESSAGES)
    continue_final_message: bool | None = Field(None, description=_OF_MESSAGES)


class DetokenizeBody(Declared):
    """Token ids whose text is wanted."""

    model: str | None = Field(None, description="one of the served names; unset: the first")
    tokens: list[TokenId]
