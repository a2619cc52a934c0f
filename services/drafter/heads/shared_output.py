"""The target's own output layer, cut to the tokens that a drafter drafts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional

from services.drafter.heads.draft_vocabulary import DraftVocabulary, lacking
from services.drafter.heads.files.target_rows import TargetRows


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

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """The output rows of those of ``tokens`` that ``vocabulary`` lacks: a request's own words can be drafted, too.

        None if there are none.
        """
        more = lacking(self.ids, tokens)
        return self._of(more) if len(more) else None

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """[..., h] to [..., V_d]: logits of ``vocabulary.ids``, shaped as the target's."""
        return self._rows.shaped(functional.linear(hidden, vocabulary.rows, vocabulary.bias))

    def _of(self, ids: torch.Tensor) -> DraftVocabulary:
        table, bias = self._rows.output, self._rows.bias
        rows = table.all() if ids.shape[0] == table.shape[0] else table.rows(ids)
        return DraftVocabulary(ids=ids, rows=rows, bias=None if bias is None else bias[ids.to(bias.device)])
