"""Models that guess several tokens ahead at once, in training: Medusa's heads and speculative streams.

Level i (from 1) of position t guesses token t + 1 + i, so the target's own distribution of that token follows from its state
at t + i. The target is frozen: nothing about the main rows is learnt, and no weight protects their loss, as in the papers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from training.learner import Prediction, Tally
from training.losses import OverVocabulary, TargetChoices, compare
from training.recipe import LevelsRecipe
from training.shards import TrainingSequence


@dataclass(frozen=True, slots=True)
class PaddedText:
    """Sequences side by side, padded behind their ends.

    Attributes:
        tokens: int64 [B, T].
        states: float32 [B, T, h], the target's, behind its final norm.
        known: bool [B, T], whether the state is there.
        begins: for each sequence, the first position that a drafter is asked to draft from.
        ends: for each sequence, the position of its last token.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    known: torch.Tensor
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], most: int, device: torch.device) -> PaddedText:
        """The last ``most`` tokens of each sequence."""
        first = [max(0, len(each.tokens) - most) for each in sequences]
        longest = max(len(each.tokens) - begin for each, begin in zip(sequences, first, strict=True))
        tokens = np.zeros((len(sequences), longest), dtype=np.int64)
        known = np.zeros((len(sequences), longest), dtype=np.bool_)
        states = np.zeros((len(sequences), longest, sequences[0].states.shape[1]), dtype=np.float32)
        for row, (each, begin) in enumerate(zip(sequences, first, strict=True)):
            length = len(each.tokens) - begin
            tokens[row, :length] = each.tokens[begin:]
            known[row, :length] = each.known[begin:]
            states[row, :length] = np.where(each.known[begin:, None], each.states[begin:], 0)
        pairs = list(zip(sequences, first, strict=True))
        return cls(
            tokens=torch.from_numpy(tokens).to(device),
            states=torch.from_numpy(states).to(device),
            known=torch.from_numpy(known).to(device),
            begins=tuple(max(0, each.prompt_length - 1 - begin) for each, begin in pairs),
            ends=tuple(len(each.tokens) - begin - 1 for each, begin in pairs),
        )

    def anchors(self, share: float, random: np.random.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions to guess from: int64 [B, A], ascending, and bool [B, A], which of them are none but fill the array.

        Args:
            share: of the positions with a state and with a token two places on.
            random: chooses them; None: all.
        """
        chosen: list[list[int]] = []
        for row, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            known = self.known[row].tolist()
            there = [position for position in range(begin, end - 1) if known[position]]
            if random is not None and there:
                there = sorted(random.choice(there, max(1, round(share * len(there))), replace=False).tolist())
            chosen.append(there)
        most = max(1, *(len(each) for each in chosen), 1)
        found = torch.zeros(len(chosen), most, dtype=torch.int64)
        filling = torch.ones(len(chosen), most, dtype=torch.bool)
        for row, positions in enumerate(chosen):
            found[row, : len(positions)] = torch.tensor(positions, dtype=torch.int64)
            filling[row, : len(positions)] = False
        return found.to(self.tokens.device), filling.to(self.tokens.device)


# An early exit's level, which is the next token itself.
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
    """

    def __init__(self, guessing: Guessing, output: torch.Tensor, ids: torch.Tensor, recipe: LevelsRecipe) -> None:
        self.module = guessing.module
        super().__init__(output, ids, recipe)
        self._guessing = guessing
        self._recipe = recipe

    def lose(self, sequences: Sequence[TrainingSequence], random: np.random.Generator, progress: float) -> Tally:
        recipe, device = self._recipe, self.rows.device
        text = PaddedText.of(sequences, recipe.max_rows, device)
        anchors, filling = text.anchors(recipe.anchors, random)
        choices = TargetChoices(self._output) if recipe.counted == "likeliest" else None
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            guesses = self._guessing.guess(text, anchors)
        total = torch.zeros((), device=device)
        overlap, counted = 0.0, 0
        for level, hidden in guesses.items():
            row, at, counts = self._labels(text, anchors, filling, level)
            told = text.tokens[row, at + 1]
            target = text.states[row, at]
            if choices is not None:
                told = choices.at(row * text.tokens.shape[1] + at, target)[1]
            held = self._held[told]
            found = compare(recipe.divergence, hidden[counts][held], target[held], self._product_rows)
            total = total + recipe.level_decay ** max(0, level) * found.value.sum()
            if level in (0, EARLY):
                # Of the streams, where there are any.
                counted, overlap = int(held.sum()), float(found.overlap.sum())
        return Tally(total, counted, overlap)

    def predict(self, sequences: Sequence[TrainingSequence], steps: int) -> Iterator[Prediction]:
        text = PaddedText.of(sequences, self._recipe.max_rows, self.rows.device)
        anchors, filling = text.anchors(1.0, None)
        guesses = self._guessing.guess(text, anchors)
        # An early exit is what is looked at where nothing else was trained.
        for level in [each for each in guesses if each != EARLY or len(guesses) == 1][:steps]:
            row, at, counts = self._labels(text, anchors, filling, level)
            places = row * text.tokens.shape[1] + at
            yield Prediction(guesses[level][counts].float(), text.states[row, at], places)

    def _labels(
        self, text: PaddedText, anchors: torch.Tensor, filling: torch.Tensor, level: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a level guesses: sequence and position of each token's state, [n] each; which of [B, A] they belong to."""
        ends = torch.tensor(text.ends, device=anchors.device)[:, None]
        at = (anchors + 1 + level).clamp(max=text.tokens.shape[1] - 1)
        row = torch.arange(len(anchors), device=anchors.device)[:, None].expand_as(at)
        counts = ~filling & (anchors + 1 + level < ends) & text.known[row, at]
        return row[counts], at[counts], counts
