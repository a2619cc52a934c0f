"""The port between a draft source and its language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.drafter.draft_model.text_cache import HeldRows, NewRows


class LanguageModel(Protocol):
    """Computes logits of rows that it adds to sessions' caches. Everything runs in one thread."""

    def new_rows(self) -> HeldRows:
        """Room for the rows of one more session."""
        ...

    def logits(self, parts: Sequence[NewRows]) -> list[torch.Tensor]:
        """Compute rows of several sessions.

        Returns:
            For each part [its ``logits``, kept ids], float32, on the CPU.
        """
        ...
