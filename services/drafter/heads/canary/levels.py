"""The canary for models that guess several tokens ahead at once: as for heads, on text that the target wrote itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.whole_texts import blocks_of
from services.drafter.heads.canary.texts import CanaryText, beside, held_states, shown_layers, states_of
from services.drafter.heads.canary.verdict import DOUBTFUL, LEAST, CanaryResult, check_at, explanation, judge, stands_out
from services.drafter.heads.files.head_config import FINAL, TargetShape, rope_of
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.streams.streams import Streams
from services.drafter.heads.streams.whole_texts import streams_of
from speculation.errors import ConfigurationError

# Of a block's guesses, those that are judged.
_JUDGED = 2

LevelModel = Streams | MedusaHeads | BlockDrafter


@dataclass(frozen=True, slots=True)
class LevelTrial:
    """A model on trial.

    Attributes:
        layers: whose states it reads, see ``Features.layers``.
        hidden: of the n tokens of a text and the states [n, h_t * layers] of their positions, what the output layer reads of
            each position's guesses, [n, levels, h]. The first guess is the token after next.
        corrected: of a text's tokens, ``hidden`` and logits [n, levels, V_d], the logits once the tokens before are known.
        others: for a target, the same weights under other settings, each with what would be wrong.
        uncorrected: the same without the head that knows the tokens before, and what is wrong with one that only spoils what
            the rows say. None: there is no such head.
    """

    model: LevelModel
    layers: tuple[int, ...]
    hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    others: Callable[[TargetShape], Iterator[tuple[str, LevelTrial]]] = lambda target: iter(())
    corrected: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = lambda tokens, hidden, logits: logits
    uncorrected: tuple[str, LevelTrial] | None = None

    @classmethod
    def of(cls, model: LevelModel) -> LevelTrial:
        """A trial of a model."""
        if isinstance(model, BlockDrafter):
            return _trial_of_blocks(model)
        if isinstance(model, MedusaHeads):
            return cls(model, (FINAL,), lambda tokens, states: model(states))

        def hidden(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            everywhere = torch.arange(len(states), device=states.device)[None]
            return streams_of(model, states[None], everywhere)[0]

        return cls(model, (model.config.state_layer,), hidden)


def _trial_of_blocks(model: BlockDrafter) -> LevelTrial:
    """A trial of a block drafter; its alternatives are the settings that no tensor shows."""
    config, layer = model.config, model.config.layer

    def hidden(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        everywhere = torch.arange(len(tokens), device=tokens.device)
        return blocks_of(model, tokens[None], states[None], everywhere[None])[0, :, :_JUDGED]

    def others(target: TargetShape) -> Iterator[tuple[str, LevelTrial]]:
        anchor, causal, rope = not config.from_anchor, not any(config.causal), rope_of(target.config)
        changed = {
            f"sample_from_anchor must be {str(anchor).lower()}": replace(config, from_anchor=anchor),
            f"is_causal must be {str(causal).lower()}": replace(config, causal=(causal,) * len(config.causal)),
            "its rope_parameters must be the target's": replace(config, layer=replace(layer, rope=rope)),
        }
        for words, other in changed.items():
            yield words, _trial_of_blocks(model.under(other))

    def corrected(tokens: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        everywhere = torch.arange(len(tokens), device=tokens.device)
        state, made = rows.new_zeros(len(tokens), model.state_size), []
        for level in range(rows.shape[1]):
            before = tokens[(everywhere + 1 + level).clamp(max=len(tokens) - 1)]
            depth = torch.full_like(everywhere, level)
            said, state = model.corrected(logits[:, level], rows[:, level], before, depth, state)
            made.append(said)
        return torch.stack(made, dim=1)

    plain = LevelTrial(model, layer.state_layers, hidden, others)
    heads = [name for name in ("markov_head", "candidate_selector", "prefix_gru") if getattr(model, name) is not None]
    if not heads:
        return plain
    without = (f"its {heads[0]} spoils what its rows say: it is another drafter's, or read another way", plain)
    return replace(plain, corrected=corrected, uncorrected=without)


def check_levels(trial: LevelTrial, texts: Sequence[CanaryText], target: TargetShape, where: str) -> CanaryResult:
    """As ``check`` of heads.

    Raises:
        ConfigurationError: as there.
    """
    lacking = [layer for layer in trial.layers if any(held_states(text, layer, target) is None for text in texts)]
    if lacking:
        raise ConfigurationError(
            f"the canary's texts hold no states of layer {lacking[0]}, which the head reads", about="the canary's texts"
        )
    tokens, first, second = _shares(trial, texts, target, trial.layers)
    if tokens < LEAST:
        raise ConfigurationError(
            f"the canary's texts hold {tokens} tokens to guess: must be {LEAST} at least", about="the canary's texts"
        )
    low = first < DOUBTFUL
    fault = explanation(first, _tried(trial, texts, target)) if low else _spoiled(trial, texts, target, second)
    return judge(CanaryResult(guesses=tokens, first=first, second=second, likely_fault=fault), where)


def check_levels_at(model: LevelModel, folder: Path, target: Path, *, asked_for: bool = True) -> CanaryResult | None:
    """``check_levels`` on the texts in a checkpoint's folder; None if there are none. Otherwise as ``check_at``."""
    return check_at(folder, target, functools.partial(check_levels, LevelTrial.of(model)), asked_for=asked_for)


def _spoiled(trial: LevelTrial, texts: Sequence[CanaryText], target: TargetShape, second: float) -> str | None:
    """Whether later guesses are better without the head that knows the tokens before: Domino's changes no first one."""
    if trial.uncorrected is None:
        return None
    words, plain = trial.uncorrected
    share = _shares(plain, texts, target, plain.layers)[2]
    return f"{words} ({share:.0%} of the second guesses without it)" if stands_out(share, second) else None


def _tried(trial: LevelTrial, texts: Sequence[CanaryText], target: TargetShape) -> Iterator[tuple[str, float]]:
    """With one thing changed at a time: what would be wrong (a flag, labels shifted by one, other layers), and the share.

    A block's rows at another place guess the token further on, too, so the flag comes first.
    """
    alternatives = [*trial.others(target), *([trial.uncorrected] if trial.uncorrected is not None else [])]
    for words, other in alternatives:
        yield words, _shares(other, texts, target, other.layers)[1]
    for by in (-1, 1):
        place = "one token further on" if by > 0 else "one token before"
        share = _shares(trial, texts, target, trial.layers, by)[1]
        yield f"its labels are shifted by one: what it guesses comes {place}", share
    for by in (-1, 1):
        layers = tuple(moved for layer in trial.layers if (moved := beside(layer, by, target)) is not None)
        held = (held_states(text, layer, target) for text in texts for layer in layers)
        if len(layers) == len(trial.layers) and all(states is not None for states in held):
            wanted, own = shown_layers(layers), shown_layers(trial.layers)
            words = f"its layers are off by one: it wants the states of {wanted}, not of {own}"
            yield words, _shares(trial, texts, target, layers)[1]


@torch.no_grad()
def _shares(
    trial: LevelTrial, texts: Sequence[CanaryText], target: TargetShape, layers: Sequence[int], shift: int = 0
) -> tuple[int, float, float]:
    """Number of guesses, and the shares of first and second ones that the target chose, ``shift`` tokens further on."""
    vocabulary = trial.model.vocabulary
    like = vocabulary.rows
    right: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for text in texts:
        tokens = text.tokens.to(like.device)
        hidden = trial.hidden(tokens, states_of(text, layers, target).to(like))
        logits = trial.model.logits(hidden.flatten(0, 1), vocabulary).view(*hidden.shape[:2], -1)
        logits = trial.corrected(tokens, hidden, logits)
        guessed = vocabulary.ids.to(like.device)[logits.argmax(-1)]
        for level, found in enumerate(right[: guessed.shape[1]]):
            place = torch.arange(len(tokens), device=like.device) + 2 + level + shift
            there = (place >= text.answer) & (place < len(tokens))
            found.append(guessed[there, level] == tokens[place[there]])
    shares = [float(torch.cat(found).double().mean()) if found else 0.0 for found in right]
    return sum(len(each) for each in right[0]), shares[0], shares[1]
