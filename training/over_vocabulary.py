"""What learners of every kind hold of the target's output layer."""

from __future__ import annotations

import torch

from training.recipe import RecipeBase


class OverVocabulary:
    """A learner's part that knows the target's output rows, and the draft vocabulary's among them.

    Args:
        output: [V, h] all of the target's output rows.
        ids: int64 [V_d].

    Attributes:
        rows: [V_d, h], the output rows of the draft vocabulary.
    """

    def __init__(self, output: torch.Tensor, ids: torch.Tensor, recipe: RecipeBase) -> None:
        self.rows = output[ids]
        self.ids = ids
        self._output = output
        self._dtype = torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
        self._product_rows = self.rows.to(self._dtype)
        # [V], whether a token is in the draft vocabulary.
        self._held = torch.zeros(len(output), dtype=torch.bool, device=output.device)
        self._held[ids] = True
