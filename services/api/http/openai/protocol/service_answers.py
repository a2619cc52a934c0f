"""What the other paths answer, and errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.api.http.openai.protocol.answers import Answered


class Error(Answered):
    """Why a request failed."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="the field that is at fault")
    code: str | None


class ErrorAnswer(Answered):
    """The body of every answer that is an error; also the last event of a stream that fails."""

    error: Error


class Tokens(Answered):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answered):
    """Of /detokenize."""

    prompt: str


class Rendered(Answered):
    """Of /v1/chat/completions/render, by vLLM's names."""

    request_id: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    priority: int


class ReloadAnswer(Answered):
    """Of /update_weights_from_disk, by SGLang's names and two of ours. What fails is an error, as everywhere."""

    success: Literal[True]
    message: str
    num_paused_requests: Literal[0] = Field(description="none is: answers end, or begin once more")
    system_fingerprint: str = Field(description="of the answers from now on")
    notes: list[str] = Field(description="what whoever has replaced the weights should know")


class PauseAnswer(Answered):
    """Of the paths that pause decoding and resume it."""

    status: Literal["paused", "resumed"]


class IsPaused(Answered):
    """Of /is_paused, by vLLM's name."""

    is_paused: bool


class TokenizerSettings(BaseModel):
    """Of /tokenizer_info: what tokenizer_config.json says."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str


class NameableDrafter(Answered):
    """A model that drafts."""

    name: str = Field(description="by which requests ask for it: speculation.drafter")
    strategy: str = Field(description="the one that drafts with it alone; auto and blend draft with it beside n-grams")


class ServedWeights(Answered):
    """Which numbers a model has: of all models that a checkpoint may stand for, answers are exact for this one."""

    stored: str = Field(description="how the checkpoint stores them; empty: not known")
    multiplied: list[str] = Field(description="as what linear layers multiply by them; that of most of them first")
    kernels: str = Field(description="what multiplies: native is Outrider's own")
    rounded_inputs: str = Field(description="how layers round what enters them; empty: they do not")
    rounded_cache: str = Field(description="how keys and values are rounded when they are stored; empty: they are not")


class Model(Answered):
    """A served model by one of its names, or one of its LoRA adapters."""

    id: str
    object: Literal["model"]
    type: Literal["model"] = Field(description="the same, for Anthropic's clients")
    display_name: str
    created: int = Field(description="when the model's files were written, in seconds since 1970")
    created_at: str = Field(description="the same, as RFC 3339 has it")
    owned_by: str
    root: str
    parent: str | None = Field(description="of an adapter, the model that it adapts")
    max_model_len: int = Field(description="most tokens of prompt and answer together")
    max_input_tokens: int = Field(description="the same, by Anthropic's name")
    max_tokens: int = Field(description="the same: an answer has what the prompt leaves")
    strategies: list[str] = Field(description="those that requests with this API key may name")
    default_strategy: str
    bit_exact: bool = Field(description="whether a token's logits are the same bits whatever shares its pass")
    weights: ServedWeights
    drafters: list[NameableDrafter] = Field(description="models that draft, which requests with this API key may name")


class Models(Answered):
    """The served models; of long lists the part that limit, after_id and before_id ask for."""

    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ChangedAdapter(Answered):
    """An adapter that has come or gone."""

    id: str
    object: Literal["model"]
    deleted: bool


class Health(Answered):
    """It is well."""

    status: Literal["ok"]


class Live(Answered):
    """It lives."""

    live: Literal[True]


class Ready(Answered):
    """It is ready."""

    ready: Literal[True]


class Version(Answered):
    """Outrider's version."""

    version: str


class Load(Answered):
    """Requests that are decoded, and those that wait for it."""

    running: int
    waiting: int


class Cache(Answered):
    """The key-value cache."""

    used: float = Field(ge=0, le=1, description="share that requests hold")
    prompt_tokens: int
    cached_prompt_tokens: int


class DecodingSums(Answered):
    """What all requests add up to."""

    tokens: int
    passes: int
    tokens_per_pass: float
    seconds_saved: float


class Source(Answered):
    """A source of drafts."""

    source: str
    drafted: int
    accepted: int


class Verifier(Answered):
    """One verifier."""

    model: str
    running: int
    waiting: int
    cache_used: float
    drafters: dict[str, bool]


class Status(Answered):
    """The live state. What follows components is shown to keys with the scope observe, and where no keys are needed."""

    object: Literal["outrider.status"]
    version: str
    ready: bool
    requests: Load
    components: dict[str, dict[str, int]]
    cache: Cache | None = None
    decoding: DecodingSums | None = None
    sources: list[Source] | None = None
    verifiers: list[Verifier] | None = None
