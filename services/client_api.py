"""The messages between users and the router, and the port that the public API talks to.

In ``RequestedSampling`` a value may be unset. The router completes it with the model's defaults to ``SamplingParams`` before
anything else sees the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from speculation.types import (
    AcceptanceRule,
    FinishReason,
    SamplingDefaults,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedSampling:
    """``SamplingParams`` as a user sends it; None or empty means unset.

    ``ignore_generation_config``: use nothing of the model's generation config but its end-of-text tokens.

    Raises:
        InvalidArgument: a value is outside its range; names the field.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_generation_config: bool | None = None

    def __post_init__(self) -> None:
        # The router computes the default of max_tokens later; any valid value will do for this check.
        SamplingParams(**{"max_tokens": 2**31 - 1, **self.given})

    @property
    def given(self) -> dict[str, Any]:
        """The values that are set, by name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value not in ((), {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """A user's request. The router fills in whatever is None.

    Attributes:
        input: text, a conversation or token ids.
        tenant, traceparent: as in ``GenerationRequest``.
        request_id: the user's own id for the request; need not be unique. Empty: the router draws one.
    """

    input: str | tuple[ChatMessage, ...] | tuple[int, ...]
    sampling: RequestedSampling
    model: str | None = None
    strategy: str | None = None
    num_speculative_tokens: int | None = None
    acceptance: AcceptanceRule | None = None
    tenant: str | None = None
    request_id: str = ""
    traceparent: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextChunk:
    """What one step added to the answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Times in seconds since the request arrived at the router; ``queue_s`` is how long it waited to be admitted."""

    queue_s: float
    time_to_first_token_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The end of an answer. ``stop`` is the stop string or stop token that ended it, if one did."""

    request_id: str
    finish_reason: FinishReason
    stop: str | int | None
    prompt_token_ids: tuple[int, ...]
    completion_tokens: int
    seed: int
    model: str
    strategy: str
    stats: SpeculationStats
    timing: Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """A served model, as users see it.

    Attributes:
        defaults: sampling values for requests that leave them unset.
        processors: further processing of the model's logits, as (name, value).
        bit_exact: a check at start found a token's logits to be the same bits whatever shares its pass. Otherwise answers
            are the same except where two tokens nearly tie.
    """

    name: str
    max_model_len: int
    vocab_size: int
    strategies: tuple[str, ...]
    default_strategy: str
    bit_exact: bool
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    processors: tuple[tuple[str, str], ...] = ()


class RouterPort(Protocol):
    """Answers users' requests. The public API talks to it."""

    def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        """Yield the answer's pieces, then exactly one ``Completion``. Leaving the iterator cancels the request.

        Raises:
            OutriderError: instead of ``Completion``.
        """

    async def models(self) -> list[ModelCard]:
        """The served models."""

    async def forget(self, tenant: str) -> None:
        """Delete what is stored of a tenant's requests.

        Raises:
            OutriderError: that could not be done everywhere.
        """

    async def ready(self) -> bool:
        """Whether requests would be answered now."""
