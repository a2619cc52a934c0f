"""What calls return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """A token and its log-probability, in nats."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """A token of the answer with its log-probability (before temperature and the like), and the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[Logprob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What one decoding step added. Text may lag behind tokens while a character is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts; ``cached_tokens`` of the prompt had been computed for an earlier request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeDecoding:
    """How the answer was sped up; the names are vLLM's, plus ``strategy`` and the last three.

    ``mean_acceptance_length`` is tokens per step, the target's own included. ``acceptance_histogram[i]`` counts the steps in
    which exactly ``i`` drafted tokens were accepted, ``accepted_by_source`` those that each source proposed. ``switches``
    says which sources of the strategy were left out, after how many tokens, and why. ``seconds_saved``: by which the answer
    came sooner than by plain decoding in the same company; negative: later; 0 where the server does not measure it.
    """

    strategy: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    seconds_saved: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds, measured at the server."""

    queue_s: float
    time_to_first_token_s: float
    total_s: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A whole answer. ``finish_reason`` is "stop" or "length"; ``stop`` is the stop string or stop token that ended it.

    ``request_id`` is what the request is called in the server's logs. ``arithmetic`` is a short hash that differs where the
    server's weights, dtype or kernels could give other tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    speculative_decoding: SpeculativeDecoding
    timing: Timing
    prompt_token_ids: tuple[int, ...]
    seed: int
    model: str
    request_id: str
    arithmetic: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A served model.

    ``defaults``: what requests get that leave an option open, from the model's generation_config.json (``max_length`` and
    ``min_length`` count the prompt as well). ``processors``: what else that file does to logits, value by name, as JSON.
    A request that says ``ignore_generation_config`` gets neither. ``bit_exact``: a token's logits were seen to be the same
    bits whatever shares its pass; otherwise answers are the same up to near ties.
    """

    name: str
    max_model_len: int
    vocab_size: int
    strategies: tuple[str, ...]
    default_strategy: str
    bit_exact: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)
    processors: Mapping[str, str] = field(default_factory=dict)
