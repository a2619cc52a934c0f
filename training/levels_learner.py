"""Models that guess several tokens ahead at once, in training: Medusa's heads and speculative streams.

Level i (from 1) of position t guesses token t + 1 + i, so the target's own distribution of that token follows from its state
at t + i. The target is frozen: nothing about the main rows is learnt, and no weight protects their loss, as in the papers;
unless the recipe has a ``text_loss``, by which the target is tuned on the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from training.learner import Prediction, Tally
from training.losses import OverVocabulary, TargetChoices, compare
from training.padded_text import PaddedText
from training.recipe import LevelsRecipe
from training.shards import TrainingSequence
from training.state_columns import StateColumns

# The level of an early exit, or of the target's own rows where it is tuned: the next token itself.
EARLY = -1

# What the output layer reads of a model's guesses from positions [B, A], by level: [B, A, h].
Guesses = dict[int, torch.Tensor]


class Guessing(Protocol):
    """A model that guesses ahead, as it is trained."""

    @property
    def module(self) -> nn.Module:
        """Its parameters that require a gradient are trained."""
        ...

    def guess(self, text: PaddedText, anchors: torch.Tensor) -> Guesses:
        """The guesses from ``anchors`` [B, A], ascending; all of ``levels``, ``EARLY``, or both."""
        ...


class LevelsLearner(OverVocabulary):
    """Implements ``Learner``. Guesses count as in ``HeadLearner``.

    Args:
        output: [V, h] all of the target's output rows.
        ids: int64 [V_d].
        columns: of the sequences' states.
    """

    def __init__(
        self, guessing: Guessing, output: torch.Tensor, ids: torch.Tensor, recipe: LevelsRecipe, columns: StateColumns
    ) -> None:
        self.module = guessing.module
        super().__init__(output, ids, recipe)
        self._guessing = guessing
        self._recipe = recipe
        self._target = columns.target

    def lose(self, sequences: Sequence[TrainingSequence], random: np.random.Generator, progress: float) -> Tally:
        recipe, device = self._recipe, self.rows.device
        text = PaddedText.of(sequences, recipe.max_rows, device)
        anchors, filling = text.anchors(recipe.anchors, random)
        choices = TargetChoices(self._output) if recipe.counted == "likeliest" else None
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            guesses = self._guessing.guess(text, anchors)
        total = torch.zeros((), device=device)
        overlap, counted = 0.0, 0
        parts: dict[str, float] = {}
        for level, hidden in guesses.items():
            row, at, counts = text.labels(anchors, filling, level)
            told = text.tokens[row, at + 1]
            if level == EARLY and recipe.text_loss:
                tuned = self._next_loss(hidden[counts], told)
                total = total + recipe.text_loss * tuned
                parts["target's own"] = float(tuned.detach())
                continue
            target = text.states[row, at, self._target]
            if choices is not None:
                told = choices.at(row * text.tokens.shape[1] + at, target)[1]
            held = self._held[told]
            found = compare(recipe.divergence, hidden[counts][held], target[held], self._product_rows)
            total = total + recipe.level_decay ** max(0, level) * found.value.sum()
            if level == 0 and recipe.text_loss:
                parts["streams"] = float(found.value.detach().sum())
            if level in (0, EARLY):
                # Of the streams, where there are any.
                counted, overlap = int(held.sum()), float(found.overlap.sum())
        return Tally(total, counted, overlap, parts)

    def _next_loss(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the text's next tokens [n] in the draft vocabulary, summed."""
        held = self._held[tokens]
        logits = hidden[held].float() @ self.rows.float().T
        return functional.cross_entropy(logits, torch.searchsorted(self.ids, tokens[held]), reduction="sum")

    def predict(self, sequences: Sequence[TrainingSequence], steps: int) -> Iterator[Prediction]:
        text = PaddedText.of(sequences, self._recipe.max_rows, self.rows.device)
        anchors, filling = text.anchors(1.0, None)
        guesses = self._guessing.guess(text, anchors)
        # An early exit is what is looked at where nothing else was trained.
        for level in [each for each in guesses if each != EARLY or len(guesses) == 1][:steps]:
            row, at, counts = text.labels(anchors, filling, level)
            places = row * text.tokens.shape[1] + at
            yield Prediction(guesses[level][counts].float(), text.states[row, at, self._target], places)
