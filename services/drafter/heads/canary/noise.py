"""The canary for Uno: as for heads, on text that the target wrote itself, but by the target's own passes.

The adapter is at the verifier, so the trial is made there, once the target is loaded, with passes that it is given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from services.drafter.heads.canary.texts import CanaryText
from services.drafter.heads.canary.verdict import ALIKE, DOUBTFUL, LEAST, CanaryResult, check_at, explanation, judge
from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.uno.config import UnoConfig, parse_uno
from speculation.errors import ConfigurationError

# Rows of noise behind a token. Further ones would change nothing for these.
_ROWS = 2


class GuessBehindNoise(Protocol):
    """The target's passes over noise, see ``services.verifier.checks.noise_guesses``."""

    def __call__(self, tokens: Sequence[int], start: int, noise: Sequence[Sequence[int]], adapted: bool, /) -> torch.Tensor:
        """The likeliest token behind each row, [len(noise), rows]: of the noise behind token ``start``, and so on."""
        ...


@dataclass(frozen=True, slots=True)
class NoiseTrial:
    """Tries Uno's adapter in ``folder`` in the passes of the target in ``target``. Can be sent to another process."""

    folder: Path
    target: Path

    def __call__(self, guess: GuessBehindNoise) -> CanaryResult | None:
        """Try it on the texts in its folder; None if there are none.

        Raises:
            ConfigurationError: as ``check``; or the texts cannot be read.
        """

        return check_at(self.folder, self.target, partial(self.check, guess), asked_for=True)

    def check(self, guess: GuessBehindNoise, texts: Sequence[CanaryText], target: TargetShape, where: str) -> CanaryResult:
        """As ``check`` of heads.

        Raises:
            ConfigurationError: as there.
        """
        config = parse_uno(self.folder, self.target)

        def said(noise: _Noise, *, adapted: bool = True) -> list[_Guesses]:
            return [_guesses(guess, text, noise, adapted=adapted) for text in texts]

        made = said(_uniform(config))
        count, first, second = _shares(made)
        if count < LEAST:
            raise ConfigurationError(
                f"the canary's texts hold {count} tokens to guess: must be {LEAST} at least", about="the canary's texts"
            )
        fault = None
        if first < DOUBTFUL:
            mask = config.noise_below if config.noise_below < target.vocab_size else None
            fault = explanation(first, _tried(made, mask, said)) or _idle(first, said(_uniform(config), adapted=False))
        return judge(CanaryResult(guesses=count, first=first, second=second, likely_fault=fault), where)


# Of a number of tokens, the noise behind each.
_Noise = Callable[[int], list[tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class _Guesses:
    """What rows of noise say in a text: ``made`` [n, rows] behind token ``start`` and each that follows."""

    text: CanaryText
    start: int
    made: torch.Tensor


def _uniform(config: UnoConfig) -> _Noise:
    """Noise as the drafter draws it."""

    def drawn(count: int) -> list[tuple[int, ...]]:
        # Any seed will do; with this one, every start says the same.
        chance = random.Random(count)
        return [tuple(chance.randrange(1, config.noise_below) for _ in range(_ROWS)) for _ in range(count)]

    return drawn


def _guesses(guess: GuessBehindNoise, text: CanaryText, noise: _Noise, *, adapted: bool) -> _Guesses:
    tokens = text.tokens.tolist()
    # From where guesses one token further on are of the answer, to where those one token before are.
    start, end = max(0, text.answer - 3), len(tokens) - 1
    return _Guesses(text, start, guess(tokens, start, noise(end - start), adapted))


def _shares(said: Sequence[_Guesses], shift: int = 0) -> tuple[int, float, float]:
    """Number of guesses, and the shares of first and second ones that the target chose, ``shift`` tokens further on."""
    right: list[list[torch.Tensor]] = [[] for _ in range(_ROWS)]
    for each in said:
        tokens, answer = each.text.tokens, each.text.answer
        for row, found in enumerate(right):
            place = torch.arange(len(each.made)) + each.start + 2 + row + shift
            there = (place >= answer) & (place < len(tokens))
            found.append(each.made[there, row] == tokens[place[there]])
    first, second = (torch.cat(found) for found in right)
    return len(first), float(first.double().mean()), float(second.double().mean())


def _tried(
    made: Sequence[_Guesses], mask: int | None, said: Callable[[_Noise], list[_Guesses]]
) -> Iterator[tuple[str, float]]:
    """With one thing changed at a time: what would be wrong, and the share that way."""
    if mask is not None:
        words = f"its rows must hold the mask token, {mask}, and not uniform noise below it, which alone is served"
        yield words, _shares(said(lambda count: [(mask,) * _ROWS] * count))[1]
    for by, place in ((-1, "one token before"), (1, "one token further on")):
        yield f"its rows, or their labels, are shifted by one: what it guesses comes {place}", _shares(made, by)[1]


def _idle(first: float, plain: Sequence[_Guesses]) -> str | None:
    """Whether the target guesses as much without the adapter, in words."""
    share = _shares(plain)[1]
    return f"without it the target guesses as much ({share:.0%})" if share + ALIKE >= first else None
