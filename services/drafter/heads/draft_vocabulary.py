"""The tokens that a head can draft, and the rows of the output layer that score them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """A draft vocabulary (FR-Spec; EAGLE-3's is trained).

    Attributes:
        ids: [V_d] int64, the target's ids, each once.
        rows: [V_d, h], the output layer's rows for them.
        bias: [V_d], or None.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    bias: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]


def lacking(ids: torch.Tensor, tokens: Iterable[int]) -> torch.Tensor:
    """Those of ``tokens`` that are not among ``ids`` [V_d], ascending: a request's own, to be drafted too."""
    asked = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=ids.device)
    return asked[~torch.isin(asked, ids)]


def ids_of_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """Target ids from EAGLE's ``d2t``: id = index + offset."""
    return torch.arange(offsets.shape[0], device=offsets.device) + offsets.to(torch.int64)


def offsets_of_ids(ids: torch.Tensor) -> torch.Tensor:
    """EAGLE's ``d2t`` from target ids."""
    return ids.to(torch.int64) - torch.arange(ids.shape[0], device=ids.device)


def membership(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """EAGLE's ``t2d``: bool [V], which tokens can be drafted."""
    held = torch.zeros(vocab_size, dtype=torch.bool)
    held[ids.cpu()] = True
    return held
