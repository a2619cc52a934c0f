"""Computes draft models by the target's kernels: joins the drafter's port to the verifier's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from services.drafter.draft_model.text_cache import NewRows
from services.verifier.kernels.native.attention_kernel import PlacedRows
from services.verifier.model.side_model import SideModel


class KernelLM:
    """Implements the drafter's ``LanguageModel``.

    Args:
        kept: the tokens whose logits are computed, ascending; None: all.
        dtype: int8 rounds the weights to eight bits; otherwise they are as stored.

    Raises:
        ConfigurationError: the kernels do not compute the model in ``folder``; says why.
    """

    def __init__(
        self, folder: Path, target: Path, kept: Sequence[int] | None, dtype: Literal["float32", "int8"] = "float32"
    ) -> None:
        self._model = SideModel(folder, target, kept, dtype=dtype)

    def new_rows(self) -> _OwnedRows:
        return _OwnedRows(self._model)

    def logits(self, parts: Sequence[NewRows]) -> list[torch.Tensor]:
        batch: list[PlacedRows] = []
        chosen: list[int] = []
        end = 0
        for part in parts:
            held, count = part.cache.held, len(part.tokens)
            assert isinstance(held, _OwnedRows)
            self._model.reserve(held.owner, part.first + count)
            batch.append(
                PlacedRows(
                    owner=held.owner, first=part.first, positions=part.positions, straight=part.text, paths=part.paths
                )
            )
            end += count
            chosen += range(end - part.logits, end)
        tokens = [token for part in parts for token in part.tokens]
        return list(torch.split(self._model.logits(batch, tokens, chosen), [part.logits for part in parts]))


class _OwnedRows:
    """Implements the drafter's ``HeldRows``."""

    def __init__(self, model: SideModel) -> None:
        self.owner = model.new_owner()
        self._model = model

    @property
    def nbytes(self) -> int:
        return self._model.nbytes(self.owner)

    def move(self, rows: Sequence[int], first: int) -> None:
        self._model.move(self.owner, rows, first)

    def clear(self) -> None:
        self._model.release(self.owner)
