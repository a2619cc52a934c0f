"""Completes the sampling parameters of a request: once, and for everything behind the router."""

from __future__ import annotations

import secrets

from services.api.messages import RequestedSampling
from speculation.errors import InvalidArgument
from speculation.messages import VerifierCard
from speculation.types import DEFAULT_MAX_TOKENS, SamplingDefaults, SamplingParams

# Defaults of a model that fill the request's field of the same name unchanged.
_PLAIN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop")


def complete_sampling(
    asked: RequestedSampling,
    card: VerifierCard,
    prompt_length: int,
    most_tokens: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The sampling parameters: first those of the request, then the model's generation config, then Outrider's defaults.

    A request without a seed gets a random one.

    Args:
        prompt_length: tokens of the prompt; below the card's ``max_model_len``.
        most_tokens: longest answer where the request does not say; None: the defaults alone count.
        bad_words: those of the request, in tokens.

    Raises:
        InvalidArgument: the requested answer does not fit into the context; names the field.
    """
    defaults = SamplingDefaults() if asked.ignore_generation_config else card.defaults
    room = card.max_model_len - prompt_length
    left = f"what the prompt leaves of max_model_len {card.max_model_len}"
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise InvalidArgument("max_tokens", asked.max_tokens, f"at most {room}: {left}")
    default = asked.max_tokens if asked.max_tokens is not None else _most(defaults, prompt_length)
    max_tokens = min(room, default, most_tokens or default)
    if asked.min_tokens is not None and asked.min_tokens > max_tokens == room:
        raise InvalidArgument("min_tokens", asked.min_tokens, f"at most {max_tokens}: {left}")
    given = {name: getattr(defaults, name) for name in _PLAIN if getattr(defaults, name) not in (None, ())}
    # The requested length overrides the model's lengths, as in transformers.
    lengths = {"max_tokens": max_tokens, "min_tokens": min(_fewest(defaults, prompt_length), max_tokens)}
    own = {**asked.given, "max_tokens": max_tokens, "bad_words": bad_words}
    return SamplingParams(**{"seed": secrets.randbits(63), **given, **lengths, **own})


def _most(defaults: SamplingDefaults, prompt_length: int) -> int:
    if defaults.max_tokens is not None:
        return defaults.max_tokens
    if defaults.max_length is None:
        return DEFAULT_MAX_TOKENS
    if defaults.max_length <= prompt_length:
        raise InvalidArgument(
            "max_tokens",
            "unset",
            f"set: the prompt has {prompt_length} tokens, and the model's generation config lets prompt and answer "
            f"together have {defaults.max_length} (max_length) where a request does not say",
        )
    return defaults.max_length - prompt_length


def _fewest(defaults: SamplingDefaults, prompt_length: int) -> int:
    if defaults.min_tokens is not None:
        return defaults.min_tokens
    return max(0, (defaults.min_length or 0) - prompt_length)
