"""Completes the sampling parameters of a request: once, and for everything behind the router."""

from __future__ import annotations

import secrets

from services.api.messages import RequestedSampling
from speculation.errors import InvalidArgument
from speculation.messages import VerifierCard
from speculation.room import check_fits, longest_answer, room_behind
from speculation.types import SamplingDefaults, SamplingParams

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
        InvalidArgument: the answer does not fit into the context, or the model has no such token; names the field.
    """
    # Before each choice takes a list to a verifier that is longer than its vocabulary.
    if 0 < card.vocab_size <= (greatest := max(asked.allowed_token_ids, default=0)):
        raise InvalidArgument("allowed_token_ids", greatest, f"token ids below {card.vocab_size}")
    defaults = SamplingDefaults() if asked.ignore_generation_config else card.defaults
    room = room_behind(prompt_length, card.max_model_len)
    check_fits("max_tokens", asked.max_tokens, room, card.max_model_len)
    max_tokens = longest_answer(
        asked.max_tokens, defaults=defaults, prompt_length=prompt_length, room=room, most=most_tokens
    )
    if max_tokens == room:
        check_fits("min_tokens", asked.min_tokens, room, card.max_model_len)
    given = {name: getattr(defaults, name) for name in _PLAIN if getattr(defaults, name) not in (None, ())}
    # The requested length overrides the model's lengths, as in transformers.
    lengths = {"max_tokens": max_tokens, "min_tokens": min(_fewest(defaults, prompt_length), max_tokens)}
    own = {**asked.given, "max_tokens": max_tokens, "bad_words": bad_words}
    return SamplingParams(**{"seed": secrets.randbits(63), **given, **lengths, **own})


def _fewest(defaults: SamplingDefaults, prompt_length: int) -> int:
    if defaults.min_tokens is not None:
        return defaults.min_tokens
    return max(0, (defaults.min_length or 0) - prompt_length)
