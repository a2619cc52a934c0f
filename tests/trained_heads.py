"""Untrained heads of hidden states for tests, written beside a tiny target's folder as checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from services.drafter.feature_draft.canary_texts import TEXTS, CanaryText, save_texts
from services.drafter.feature_draft.head import FeatureHead
from services.drafter.feature_draft.head_config import head_for
from services.drafter.feature_draft.head_writing import save_head
from services.drafter.feature_draft.target_rows import read_target_rows, read_target_shape

FAMILIES: tuple[Literal["eagle", "fspad", "eagle3"], ...] = ("eagle", "fspad", "eagle3")
# The hidden states that they read, of a target of two layers.
LAYERS: dict[str, tuple[int, ...]] = {"eagle": (-1,), "fspad": (-1,), "eagle3": (0, 1)}


def make_head(target: Path, folder: Path, family: Literal["eagle", "fspad", "eagle3"]) -> Path:
    """Write a head for the target, which copies the state that it is given and so is right now and then."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(2)
        config = head_for(read_target_shape(target), family, state_layers=LAYERS[family])
        head = FeatureHead(config, read_target_rows(target))
        save_head(head, folder, {}, dtype=torch.float32)
    return folder


def make_useless_head(target: Path, folder: Path) -> Path:
    """Write a head with a canary's texts, of which it guesses next to nothing: the target never wrote them."""
    make_head(target, folder, "eagle")
    shape = read_target_shape(target)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(shape.vocab_size, (200,), generator=generator)
    states = {layer: torch.randn(200, shape.hidden_size, generator=generator) for layer in (0, -1)}
    save_texts([CanaryText(tokens=tokens, answer=8, states=states)], folder / TEXTS)
    return folder


def heads_beside(target: Path) -> dict[str, Path]:
    """A checkpoint of each family in a folder beside the target's, made once."""
    return {family: make_head(target, target.parent / f"{target.name}-{family}", family) for family in FAMILIES}
