"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.api.http.declared import Whole
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyTrue, Refused, TokenId
from services.api.http.openai.protocol.parts import Filled
from services.api.http.openai.protocol.shared_body import SharedBody
from speculation import limits

# Of OpenAI's API, for requests that do not say.
DEFAULT_TOKENS = 16
# Most prompts in a request, and most answers to all of them.
MAX_PROMPTS = 128

Tokens = Annotated[list[TokenId], Field(min_length=1)]
Prompts = Annotated[list[Filled], Field(min_length=1, max_length=MAX_PROMPTS)]
PromptsOfTokens = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionBody(SharedBody):
    """Text that the model continues."""

    prompt: Filled | Tokens | Prompts | PromptsOfTokens = Field(description="a text, token ids, or a list of either")
    max_tokens: Whole | None = Field(
        None, ge=0, le=limits.MAX_TOKENS, description=f"0: what is said of the prompt alone; unset: {DEFAULT_TOKENS}"
    )
    logprobs: Whole | None = Field(
        None, ge=0, le=limits.MAX_LOGPROBS, description=f"how many likeliest tokens, 0 to {limits.MAX_LOGPROBS}"
    )
    echo: bool | None = Field(None, description="with logprobs, the prompt's own log-probabilities, too")
    suffix: str | None = Field(
        None, description="the text behind a gap, of models with fill-in-the-middle tokens; empty: text is continued"
    )
    best_of: Whole | None = Field(
        None, ge=1, le=limits.MAX_TOKENS, description="n, or 1 where n is 1: answers are not ranked"
    )

    add_special_tokens: Annotated[OnlyTrue | None, NO_EFFECT] = Field(
        None, description="true: prompts get the special tokens that the tokenizer adds"
    )
    include_reasoning: Annotated[OnlyTrue | None, NO_EFFECT] = Field(None, description="true: nothing is cut out of texts")
    prompt_embeds: Refused = Field(None, description="unset: prompts are text or token ids")
    messages: Refused = Field(None, description="unset: say prompt, or use /v1/chat/completions")
    max_completion_tokens: Refused = Field(None, description="unset: say max_tokens")
    top_logprobs: Refused = Field(None, description="unset: logprobs says how many")
    thinking_token_budget: Refused = Field(None, description="unset: say it to /v1/chat/completions")
