"""Models that guess several tokens ahead and have learnt a text by heart, and what the canary says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.canary.levels import LevelTrial, check_levels
from services.drafter.heads.canary.texts import CanaryText, record_texts
from services.drafter.heads.canary.verdict import CanaryResult
from services.drafter.heads.files.head_config import FINAL
from services.drafter.heads.files.target_shape import read_target_shape
from tests.tiny_models.trained_heads import make_blocks

# Of the target.
LAYERS = 4


def text_of(target: Path, tokens: Sequence[int]) -> CanaryText:
    """A text of these tokens, with each layer's states turned another way: those of random layers are nearly the same."""
    model = AutoModelForCausalLM.from_pretrained(target)
    (made,) = record_texts(model, [tokens], (*range(LAYERS), FINAL), length=1)
    turned = {layer: rows @ torch.linalg.qr(torch.randn(64, 64)).Q for layer, rows in made.states.items() if layer != FINAL}
    return CanaryText(tokens=made.tokens, answer=10, states={**made.states, **turned})


def learnt(trial: LevelTrial, text: CanaryText, states: torch.Tensor, shift: int = 0) -> LevelTrial:
    """The model once it has learnt the text by heart, from ``states`` and with labels ``shift`` tokens further on.

    Where a head knows the tokens before, its rows learn what they can say without it, too.
    """
    model = trial.model.requires_grad_(True).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    states, count = states.clone(), len(text.tokens)
    for _ in range(80):
        hidden = trial.hidden(text.tokens, states)
        logits = model.logits(hidden.flatten(0, 1), model.vocabulary).view(*hidden.shape[:2], -1)
        said = [logits] if trial.uncorrected is None else [logits, trial.corrected(text.tokens, hidden, logits)]
        losses = []
        for level in range(hidden.shape[1]):
            place = torch.arange(count) + 2 + level + shift
            labels = text.tokens[place.clamp(max=count - 1)]
            for each in said:
                # What a selector left out cannot be learnt.
                there = (place < count) & each[torch.arange(count), level, labels].isfinite()
                losses.append(functional.cross_entropy(each[there, level], labels[there]))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    model.requires_grad_(False).eval()
    return trial


def check(trial: LevelTrial, text: CanaryText, target: Path) -> CanaryResult:
    """What the canary measures; raises ConfigurationError as at a start."""
    return check_levels(trial, [text], read_target_shape(target), "HEAD")


def blocks(target: Path, folder: Path, **given: Any) -> LevelTrial:
    """A block drafter that reads the first two layers, from its file."""
    return LevelTrial.of(load_blocks(make_blocks(target, folder, layers=(0, 1), **given), target))
