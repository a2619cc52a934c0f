"""The law of the simulated target: which token follows a text, by a computation that is too simple to be wrong.

Every position of the text counts, so that a lost, stale or foreign row of the key-value cache changes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from services.verifier.model.target_port import PackedBits
from speculation.types import SamplingParams

# Tokens of the tokenizer that the texts are made of. So few make n-grams occur again, which drafters live on.
LETTERS = tuple(range(71, 77))
EOS = 0
# One in so many choices ends a text.
_ENDS = 40
_MASK = (1 << 61) - 1
_TRIES = 8


@lru_cache(1 << 16)
def row_of(token: int, position: int, weights: int) -> int:
    """What the cache holds of a token at a position, by a target with these weights."""
    row = ((token + 1) * 0x9E3779B97F4A7C15 ^ (position + 1) * 0xC2B2AE3D27D4EB4F) * 0x165667B19E3779F9
    return row + weights * (2 * position + 1) & _MASK


def mixed(number: int) -> int:
    """A hash of a number, 61 bits."""
    number = (number ^ number >> 31) * 0xBF58476D1CE4E5B9 & _MASK
    return number ^ number >> 27


def chosen(state: int, position: int, params: SamplingParams, allowed: PackedBits | None) -> int:
    """The token at ``position`` after a text whose rows sum up to ``state``.

    Args:
        allowed: the tokens that a rule allows; None: all.
    """
    number = mixed(state + position)
    if params.temperature:
        number = mixed(number + params.seed * 0x9E3779B1)
    for _ in range(_TRIES):
        number = mixed(number + 0x632BE5AB)
        token = EOS if number % _ENDS == 0 else LETTERS[number // _ENDS % len(LETTERS)]
        if allowed is None or _has(allowed, token):
            return token
    assert allowed is not None
    size = 8 * len(allowed)
    return next(token for token in ((number + step) % size for step in range(size)) if _has(allowed, token))


def plain_answer(
    prompt: Sequence[int],
    params: SamplingParams,
    most: int,
    allowed: Callable[[Sequence[int]], PackedBits | None] | None = None,
    weights: int = 0,
) -> list[int]:
    """The whole answer by plain decoding, one token after the other.

    Args:
        most: longest answer.
        allowed: what a rule allows after the answer so far.
        weights: those of a verifier; others choose other tokens.
    """
    state = weights + sum(row_of(token, position, weights) for position, token in enumerate(prompt))
    answer: list[int] = []
    while len(answer) < most:
        position = len(prompt) + len(answer)
        bits = None if allowed is None else allowed(answer)
        token = chosen(state, position, params, bits)
        answer.append(token)
        if token == EOS and not params.ignore_eos:
            break
        state += row_of(token, position, weights)
    return answer


def _has(bits: PackedBits, token: int) -> bool:
    return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)
