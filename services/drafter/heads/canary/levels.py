"""The canary for models that guess several tokens ahead at once: as for heads, on text that the target wrote itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.drafter.heads.canary.heads import (
    DOUBTFUL,
    LEAST,
    CanaryResult,
    check_at,
    held_states,
    judge,
    shown_layers,
    stands_out,
)
from services.drafter.heads.canary.texts import CanaryText, beside
from services.drafter.heads.files.head_config import FINAL, TargetShape
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.streams.streams import Streams
from services.drafter.heads.streams.whole_texts import streams_of
from speculation.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LevelTrial:
    """A model on trial.

    Attributes:
        layer: whose states it reads, see ``Features.layers``.
        hidden: of states [n, h] of a text's positions, what the output layer reads of each one's guesses, [n, levels, h].
    """

    model: Streams | MedusaHeads
    layer: int
    hidden: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, model: Streams | MedusaHeads) -> LevelTrial:
        """A trial of a model."""
        if isinstance(model, MedusaHeads):
            return cls(model, FINAL, model)

        def hidden(states: torch.Tensor) -> torch.Tensor:
            everywhere = torch.arange(len(states), device=states.device)[None]
            return streams_of(model, states[None], everywhere)[0]

        return cls(model, model.config.state_layer, hidden)


def check_levels(trial: LevelTrial, texts: Sequence[CanaryText], target: TargetShape, where: str) -> CanaryResult:
    """As ``check`` of heads.

    Raises:
        ConfigurationError: as there.
    """
    if any(held_states(text, trial.layer, target) is None for text in texts):
        raise ConfigurationError(
            f"the canary's texts hold no states of layer {trial.layer}, which the head reads", about="the canary's texts"
        )
    tokens, first, second = _shares(trial, texts, target, trial.layer)
    if tokens < LEAST:
        raise ConfigurationError(
            f"the canary's texts hold {tokens} tokens to guess: must be {LEAST} at least", about="the canary's texts"
        )
    fault = _explained(trial, texts, target, first) if first < DOUBTFUL else None
    return judge(CanaryResult(guesses=tokens, first=first, second=second, likely_fault=fault), where)


def check_levels_at(
    model: Streams | MedusaHeads, folder: Path, target: Path, *, asked_for: bool = True
) -> CanaryResult | None:
    """``check_levels`` on the texts in a checkpoint's folder; None if there are none. Otherwise as ``check_at``."""
    return check_at(folder, target, functools.partial(check_levels, LevelTrial.of(model)), asked_for=asked_for)


def _explained(trial: LevelTrial, texts: Sequence[CanaryText], target: TargetShape, first: float) -> str | None:
    """What explains a low share, in words: another layer, or labels shifted by one."""
    best, words = first, None
    for by in (-1, 1):
        share = _shares(trial, texts, target, trial.layer, by)[1]
        if share > best and stands_out(share, first):
            place = "one token further on" if by > 0 else "one token before"
            best, words = share, f"its labels are shifted by one: what it guesses comes {place}"
    for by in (-1, 1):
        layer = beside(trial.layer, by, target)
        if layer is None or any(held_states(text, layer, target) is None for text in texts):
            continue
        share = _shares(trial, texts, target, layer)[1]
        if share > best and stands_out(share, first):
            other, own = shown_layers((layer,)), shown_layers((trial.layer,))
            best, words = share, f"its layers are off by one: it wants the states of {other}, not of {own}"
    return None if words is None else f"{words} ({best:.0%} that way)"


@torch.no_grad()
def _shares(
    trial: LevelTrial, texts: Sequence[CanaryText], target: TargetShape, layer: int, shift: int = 0
) -> tuple[int, float, float]:
    """Number of guesses, and the shares of first and second ones that the target chose, ``shift`` tokens further on."""
    like = next(trial.model.parameters())
    vocabulary = trial.model.vocabulary
    right: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for text in texts:
        states = held_states(text, layer, target)
        assert states is not None
        hidden = trial.hidden(states.to(like))
        tokens = text.tokens.to(like.device)
        logits = trial.model.logits(hidden.flatten(0, 1), vocabulary).view(*hidden.shape[:2], -1)
        guessed = vocabulary.ids.to(like.device)[logits.argmax(-1)]
        for level, found in enumerate(right[: guessed.shape[1]]):
            place = torch.arange(len(tokens), device=like.device) + 2 + level + shift
            there = (place >= text.answer) & (place < len(tokens))
            found.append(guessed[there, level] == tokens[place[there]])
    shares = [float(torch.cat(found).double().mean()) if found else 0.0 for found in right]
    return sum(len(each) for each in right[0]), shares[0], shares[1]
