"""A draft model in training: some of the target's layers, distilled on the target's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from services.model_files.folder import reading
from speculation.errors import ConfigurationError
from training.learner import Prediction, Tally
from training.losses import OverVocabulary, TargetChoices, compare
from training.recipe import LayersRecipe
from training.shards import TrainingSequence


def new_draft_model(recipe: LayersRecipe, target: Path) -> nn.Module:
    """A causal language model of transformers with the target's layers ``recipe.layers``. Its embeddings and output layer
    are the target's and stay as they are.

    Args:
        target: folder with float weights that transformers can read.

    Raises:
        ConfigurationError: the target cannot be loaded, or lacks such a layer or a list of layers.
    """
    from transformers import AutoModelForCausalLM

    with reading(f"load the target at {target}", about=target):
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="sdpa")
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigurationError(
            f"{type(model).__name__} has no list of layers: this target can train heads, no draft model",
            about=type(model).__name__,
        )
    if not all(0 <= layer < len(layers) for layer in recipe.layers):
        raise ConfigurationError(
            field="the recipe's layers", verb="are", value=list(recipe.layers), allowed=f"from 0 to {len(layers) - 1}"
        )
    kept = [layers[index] for index in recipe.layers]
    for number, layer in enumerate(kept):
        # Caches are found by this number.
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                setattr(part, "layer_idx", number)  # noqa: B010
    model.base_model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[index] for index in recipe.layers]
    model.config.use_cache = True
    model.get_input_embeddings().requires_grad_(False)
    output = model.get_output_embeddings()
    if output is not None:
        output.requires_grad_(False)
    for layer in kept[: recipe.frozen_layers]:
        layer.requires_grad_(False)
    return model  # type: ignore[no-any-return]


class LayersLearner(OverVocabulary):
    """Implements ``Learner``. Predictions count as in ``HeadLearner``; position p predicts token p + 1.

    Args:
        output: [V, h] all of the target's output rows.
        ids: int64 [V_d].
    """

    def __init__(self, module: nn.Module, output: torch.Tensor, ids: torch.Tensor, recipe: LayersRecipe) -> None:
        self.module = module
        super().__init__(output, ids, recipe)
        self._recipe = recipe

    def lose(self, sequences: Sequence[TrainingSequence], random: np.random.Generator, progress: float) -> Tally:
        found, following = self._run(sequences, prompts=self._recipe.prompt_rows)
        told = following
        if self._recipe.counted == "likeliest":
            _, told = TargetChoices(self._output).at(found.positions, found.states)
        counts = self._held[told]
        hidden, states = found.hidden[counts], found.states[counts]
        compared = compare(self._recipe.divergence, hidden, states, self._product_rows)
        loss = compared.value.sum()
        parts = {}
        if self._recipe.state_weight:
            apart = ((hidden - states).square().sum(-1) / states.square().sum(-1).clamp(min=1e-6)).sum()
            parts = {"divergence": float(loss.detach()), "states": float(apart.detach())}
            loss = loss + self._recipe.state_weight * apart
        return Tally(loss, int(counts.sum()), float(compared.overlap.sum()), parts)

    def predict(self, sequences: Sequence[TrainingSequence], steps: int) -> Iterator[Prediction]:
        # What it drafted is text like any other: further tokens are as likely as the first.
        found, _ = self._run(sequences, prompts=False)
        for _ in range(steps):
            yield found

    def _run(self, sequences: Sequence[TrainingSequence], *, prompts: bool) -> tuple[Prediction, torch.Tensor]:
        """All predictions of the answers, or of the prompts too, whose state is known and whose token exists, and these
        tokens."""
        most, device = self._recipe.max_rows, self.rows.device
        parts = [max(0, len(sequence.tokens) - most) for sequence in sequences]
        longest = max(len(sequence.tokens) - first for sequence, first in zip(sequences, parts, strict=True))
        tokens = np.zeros((len(sequences), longest), dtype=np.int64)
        counts = np.zeros((len(sequences), longest), dtype=np.bool_)
        states = []
        for row, (sequence, first) in enumerate(zip(sequences, parts, strict=True)):
            length = len(sequence.tokens) - first
            tokens[row, :length] = sequence.tokens[first:]
            # The first token of the answer is the target's, from the pass over the prompt.
            begin = 0 if prompts else min(max(0, sequence.prompt_length - first), length - 1)
            counts[row, begin : length - 1] = sequence.known[first + begin : first + length - 1]
            states.append(sequence.states[first:][counts[row, :length]].astype(np.float32))
        ids, counted = torch.from_numpy(tokens).to(device), torch.from_numpy(counts).to(device)
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            # Padding stands behind the text, where no row of it looks.
            output = self.module.base_model(input_ids=ids, use_cache=False)  # type: ignore[operator]
        hidden = output.last_hidden_state[counted]
        following = torch.roll(ids, -1, dims=1)[counted]
        made = torch.from_numpy(np.concatenate(states)).to(device)
        return Prediction(hidden.float(), made, torch.arange(len(made), device=device)), following
