"""A block drafter in training: all guesses of a block from the states before it, each corrected by the token before.

Level i (from 0) of position t guesses token t + 2 + i. The tokens before are the text's, as in DSpark (arXiv 2607.05147):
how far a path is right is learnt by the confidence head, from the chance that the target accepts a draft of this level.
A plain DFlash (2602.06036) has neither head: its loss is the divergence alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional
from typing_extensions import override

from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.sequential import ConfidenceHead
from services.drafter.heads.blocks.whole_texts import blocks_of
from training.learner import Prediction, Tally
from training.losses import OverVocabulary, TargetChoices, compare
from training.padded_text import PaddedText
from training.recipe import BlockRecipe
from training.shards import TrainingSequence
from training.state_columns import StateColumns


class BlockLearner(OverVocabulary):
    """Implements ``Learner``. Guesses count as in ``HeadLearner``.

    Args:
        module: with a Markov head that keeps no state, and a confidence head, or with neither.
        output: [V, h] all of the target's output rows.
        ids: int64 [V_d].
        columns: of the sequences' states.
    """

    def __init__(
        self, module: BlockDrafter, output: torch.Tensor, ids: torch.Tensor, recipe: BlockRecipe, columns: StateColumns
    ) -> None:
        self.module: BlockDrafter = module
        super().__init__(output, ids, recipe)
        self._recipe = recipe
        self._columns = columns

    @property
    @override
    def own_rows(self) -> torch.Tensor | None:
        markov = self.module.markov_head
        return None if markov is None else markov.markov_w2.weight

    def lose(self, sequences: Sequence[TrainingSequence], random: np.random.Generator, progress: float) -> Tally:
        recipe, device = self._recipe, self.rows.device
        text = PaddedText.of(sequences, recipe.max_rows, device)
        anchors, filling = text.anchors(recipe.anchors, random)
        choices = TargetChoices(self._output) if recipe.counted == "likeliest" else None
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            hidden = self._blocks(text, anchors)
        total = torch.zeros((), device=device)
        overlap, counted = 0.0, 0
        parts: dict[str, float] = {}
        for level, rows in enumerate(hidden.float().unbind(2)):
            row, at, counts = text.labels(anchors, filling, level)
            told = text.tokens[row, at + 1]
            target = text.states[row, at, self._columns.target]
            if choices is not None:
                told = choices.at(row * text.tokens.shape[1] + at, target)[1]
            held = self._held[told]
            own, previous = rows[counts][held], text.tokens[row, at][held]
            found = compare(
                recipe.divergence, self._corrected(own, previous), target[held], self._product_rows, own=self.own_rows
            )
            loss = found.value.sum()
            if level == 0:
                counted, overlap = int(held.sum()), float(found.overlap.sum())
            if (head := self.module.confidence_head) is not None:
                doubt = self._doubt(head, own, previous, found.overlap)
                if level == 0:
                    parts = {"divergence": float(loss.detach()), "confidence": float(doubt.detach())}
                loss = loss + recipe.confidence_weight * doubt
            total = total + recipe.level_decay**level * loss
        return Tally(total, counted, overlap, parts)

    def predict(self, sequences: Sequence[TrainingSequence], steps: int) -> Iterator[Prediction]:
        text = PaddedText.of(sequences, self._recipe.max_rows, self.rows.device)
        anchors, filling = text.anchors(1.0, None)
        for level, rows in enumerate(self._blocks(text, anchors).unbind(2)[:steps]):
            row, at, counts = text.labels(anchors, filling, level)
            hidden = self._corrected(rows[counts].float(), text.tokens[row, at])
            places = row * text.tokens.shape[1] + at
            yield Prediction(hidden, text.states[row, at, self._columns.target], places)

    def _blocks(self, text: PaddedText, anchors: torch.Tensor) -> torch.Tensor:
        """[B, A, levels, h]."""
        return blocks_of(self.module, text.tokens, text.states[..., self._columns.read], anchors, text.known)

    def _corrected(self, rows: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """[n, h + rank]: rows, and behind them what the Markov head, if there is one, makes of the tokens before."""
        if self.module.markov_head is None:
            return rows
        weighed, _ = self.module.markov_head.weighed(rows, previous, rows[:, :0])
        return torch.cat((rows, weighed), dim=-1)

    def _doubt(
        self, head: ConfidenceHead, rows: torch.Tensor, previous: torch.Tensor, overlap: torch.Tensor
    ) -> torch.Tensor:
        """The confidence head's loss, summed. It changes neither the rows nor what the Markov head knows of tokens."""
        with torch.no_grad():
            read = self.module.confidence_read(rows, previous)
        return functional.binary_cross_entropy(head(read), overlap.clamp(0, 1), reduction="sum")
