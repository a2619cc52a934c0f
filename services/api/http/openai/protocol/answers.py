"""What chat and text completions answer, whole and in events. A field with a default is there only where it is asked for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answered(BaseModel):
    """An object of an answer. It has no fields but these."""

    model_config = ConfigDict(extra="forbid")


class PromptTokens(Answered):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="those that had been computed for an earlier request")


class PredictedTokens(Answered):
    """Of the prediction's tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answered):
    """Counts of tokens: each prompt's once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None
    completion_tokens_details: PredictedTokens | None = None


class ComparedStrategy(Answered):
    """What the answer would have taken under another strategy; null: not known."""

    strategy: str
    num_passes: int | None
    tokens_per_pass: float | None
    seconds: float | None
    exact: bool
    without: list[str]


class Decoding(Answered):
    """How the choices were drafted, by vLLM's names."""

    strategy: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_tokens: int = Field(description="most tokens that a pass may draft")
    acceptance_histogram: list[int] = Field(
        description="entry i: passes with i accepted tokens; num_spec_tokens + 1 entries"
    )
    acceptance_histogram_by_draft_length: dict[int, list[int]] | None = Field(
        None, description="the same of passes that drafted so many tokens (speculation.report)"
    )
    accepted_by_source: dict[str, int]
    switches: list[str]
    seconds_saved: float
    rule: str | None = Field(None, description="the rule of the router that chose how to draft")
    learnt: str | None = Field(None, description="why the router chose the strategy by what it has learnt of such requests")
    comparisons: list[ComparedStrategy] | None = None


class Metrics(Answered):
    """Times in seconds, and how the answer was drafted."""

    speculative_decoding: Decoding
    queue_s: float
    time_to_first_token_s: float
    total_s: float


class OriginOfToken(Answered):
    """A token, and who guessed it; target: nobody did."""

    id: int
    text: str
    source: str


class Origins(Answered):
    """Where the tokens come from, and the passes that brought them (speculation.report)."""

    tokens: list[OriginOfToken]
    passes: list[dict[str, Any]] | None = None


class TopToken(Answered):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopToken):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TopToken]


class ChatLogprobs(Answered):
    """Log-probabilities of a chat completion's tokens."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(Answered):
    """Log-probabilities of a text completion's tokens, and of an echoed prompt's before them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Answered):
    """A token that the prompt has in a place, or might have had."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
Finish = Literal["stop", "length", "tool_calls"]


class ToolCallFunction(Answered):
    """A function and its arguments, as JSON."""

    name: str
    arguments: str


class ToolCall(Answered):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ToolCallFunction


class AnswerMessage(Answered):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class _Choice(Answered):
    index: int
    finish_reason: Finish | None
    stop_reason: str | int | None = None
    seed: int | None = Field(None, description="with which the choice can be had again")
    token_ids: list[int] | None = None
    speculation: Origins | None = None


class ChatChoice(_Choice):
    """One answer to the conversation."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(_Choice):
    """One continuation of a prompt, or a piece of one."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _Answer(Answered):
    id: str
    created: int = Field(description="Unix time in seconds")
    model: str
    system_fingerprint: str = Field(description="differs where the server's version or the model could give other tokens")
    service_tier: Literal["default"] | None = None
    usage: Usage | None = None
    metrics: Metrics | None = None
    prompt_token_ids: list[int] | None = None


class _Event(_Answer):
    obfuscation: str | None = Field(None, description="fills the event up, so that its size tells less")


class ChatCompletion(_Answer):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


class Completion(_Answer):
    """The continuations of the prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionEvent(_Event):
    """A piece of the continuations."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class FunctionDelta(Answered):
    """A piece of a function's call."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(Answered):
    """A piece of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(Answered):
    """A piece of what the model says."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChoiceDelta(_Choice):
    """A piece of one answer."""

    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(_Event):
    """A piece of the answer to a conversation. The last one has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChoiceDelta]
