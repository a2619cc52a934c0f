"""A head of states in training: distillation of next-token distributions, and of states while nothing is unrolled."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch.nn import functional
from typing_extensions import override

from services.drafter.heads.eagle.head import FeatureHead
from training.batches import head_rows
from training.learner import Prediction, Tally
from training.losses import OverVocabulary, TargetChoices, TopTokens, compare
from training.recipe import UnrolledRecipe
from training.shards import TrainingSequence
from training.state_columns import StateColumns
from training.unroll import unroll


class HeadLearner(OverVocabulary):
    """Implements ``Learner``.

    A prediction counts in the loss if it belongs to the answer, the target's state is known, and a token is in the draft
    vocabulary: the text's, or the target's likeliest (``recipe.counted``). Of greedy text they are the same; of sampled text
    the text's weighs rows by the mass that the vocabulary covers.

    Args:
        output: [V, h] all of the target's output rows.
        ids: int64 [V_d].
        columns: of the sequences' states.
    """

    def __init__(
        self, module: FeatureHead, output: torch.Tensor, ids: torch.Tensor, recipe: UnrolledRecipe, columns: StateColumns
    ) -> None:
        self.module: FeatureHead = module
        super().__init__(output, ids, recipe)
        self._recipe = recipe
        self._target = columns.target
        self._top = TopTokens(recipe.top_k, recipe.top_k_weight) if recipe.top_k_weight else None

    @property
    @override
    def own_rows(self) -> torch.Tensor | None:
        return None if self.module.lm_head is None else self.module.lm_head.weight

    def lose(self, sequences: Sequence[TrainingSequence], random: np.random.Generator, progress: float) -> Tally:
        recipe, device = self._recipe, self.rows.device
        rows = head_rows(sequences, recipe.max_rows, device, recipe, random)
        if rows is None:
            return Tally(torch.zeros((), device=device, requires_grad=True), 0, 0.0)
        unrolled = recipe.unroll_steps > 1 and progress >= recipe.unroll_from
        total = torch.zeros((), device=device)
        overlap, counted = 0.0, 0
        parts: dict[str, float] = {}
        choices = TargetChoices(self._output) if recipe.counted == "likeliest" else None
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32))
            stack.enter_context(warnings.catch_warnings())
            # Norms of bfloat16 rows with float32 weights: what autocast is for.
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            for number, step in enumerate(unroll(self.module, rows, recipe.unroll_steps if unrolled else 1, recipe.detach)):
                _, at, exists = rows.ahead(number)
                counts = exists[step.rows]
                told = rows.label(number)[step.rows]
                if choices is not None:
                    places = at[step.rows[counts]]
                    with torch.autocast(device.type, enabled=False):
                        told[counts] = choices.at(places, rows.states[places, self._target])[1]
                counts = counts & self._held[told]
                target = rows.states[at[step.rows[counts]], self._target]
                found = compare(
                    recipe.divergence, step.hidden[counts], target, self._product_rows, own=self.own_rows, top=self._top
                )
                loss = recipe.divergence_weight * found.value.sum()
                near = self._state_loss(step.state[counts], target, learnt=not unrolled) if number == 0 else None
                if near is not None and not unrolled:
                    loss = loss + recipe.state_loss * near
                total = total + recipe.unroll_decay**number * loss
                if number == 0:
                    counted, overlap = len(target), float(found.overlap.sum())
                    if near is not None:
                        parts = {"divergence": float(found.value.detach().sum()), "states": float(near.detach())}
        return Tally(total, counted, overlap, parts)

    def _state_loss(self, state: torch.Tensor, target: torch.Tensor, *, learnt: bool) -> torch.Tensor | None:
        """SmoothL1 between what is fed back and the target's states, summed over rows; None where the recipe has no such
        loss. What is no longer ``learnt`` is told all the same."""
        if not self._recipe.state_loss:
            return None
        with torch.set_grad_enabled(learnt and torch.is_grad_enabled()):
            return functional.smooth_l1_loss(state.float(), target, reduction="none").mean(-1).sum()

    def predict(self, sequences: Sequence[TrainingSequence], steps: int) -> Iterator[Prediction]:
        rows = head_rows(sequences, self._recipe.max_rows, self.rows.device)
        if rows is None:
            return
        for number, step in enumerate(unroll(self.module, rows, steps)):
            _, at, exists = rows.ahead(number)
            counts = step.rows[exists[step.rows]]
            yield Prediction(step.hidden[exists[step.rows]].float(), rows.states[at[counts], self._target], at[counts])
