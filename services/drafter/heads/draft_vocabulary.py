"""The tokens that a head can draft, and the rows of the output layer that score them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.products import HeadProducts


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftVocabulary:
    """A draft vocabulary (FR-Spec; EAGLE-3's is trained).

    Attributes:
        ids: [V_d] int64, the target's ids, each once.
        rows: [V_d, h], the output layer's rows for them.
        bias: [V_d], or None.
        product: multiplies by rows and bias, faster than torch; None: torch does.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    bias: torch.Tensor | None = None
    product: nn.Module | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    def by(self, products: HeadProducts) -> DraftVocabulary:
        """The same, multiplied by the kernels."""
        return replace(self, product=products.over(self.rows, self.bias))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., h] to [..., V_d]: each row times ``rows``, and ``bias``."""
        if self.product is None:
            return functional.linear(hidden, self.rows, self.bias)
        scored: torch.Tensor = self.product(hidden)
        return scored


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


class SharedOutput:
    """The target's output rows of a draft vocabulary; frozen, and nobody's parameters.

    Args:
        ids: [V_d] int64, the target tokens that are drafted.
    """

    def __init__(self, rows: TargetRows, ids: torch.Tensor) -> None:
        self.ids = ids
        self._rows = rows
        # Made at first use: where there is a GPU, the drafter may still move to it.
        self._vocabulary: DraftVocabulary | None = None

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that are drafted for every request."""
        if self._vocabulary is None:
            self._vocabulary = self._of(self.ids)
        return self._vocabulary

    def multiply_by(self, products: HeadProducts) -> None:
        """Score what is drafted for every request by the kernels."""
        self._vocabulary = self.vocabulary.by(products)

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """The output rows of those of ``tokens`` that ``vocabulary`` lacks: a request's own words can be drafted, too.

        None if there are none.
        """
        more = lacking(self.ids, tokens)
        return self._of(more) if len(more) else None

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """[..., h] to [..., V_d]: logits of ``vocabulary.ids``, shaped as the target's."""
        return self._rows.shaped(vocabulary.scores(hidden))

    def _of(self, ids: torch.Tensor) -> DraftVocabulary:
        table, bias = self._rows.output, self._rows.bias
        rows = table.all() if ids.shape[0] == table.shape[0] else table.rows(ids)
        return DraftVocabulary(ids=ids, rows=rows, bias=None if bias is None else bias[ids.to(bias.device)])
