"""What all drafters of the target's states do with its embedding and output rows: share them, or have their own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import nn

from services.drafter.heads.draft_vocabulary import DraftVocabulary, SharedOutput
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.products import HeadProducts, take_weights


class OnTargetRows(nn.Module):
    """Base of a drafter over the target's rows. Its own, if it has any, are parameters; the target's are not.

    Attributes:
        embed_tokens: its own embeddings, or None.
        lm_head: its own output layer over the draft vocabulary, or None.
    """

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None

    def _take_rows(self, sizes: HeadConfig, rows: TargetRows, draft_ids: torch.Tensor | None) -> None:
        """To be called once, at the end of the constructor.

        Args:
            draft_ids: [V_d] int64, the target tokens that it drafts; None: all.
        """
        size, self._sizes = sizes.hidden_size, sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, size) if sizes.own_embedding else None
        self.lm_head = nn.Linear(size, sizes.draft_vocab_size, bias=False) if sizes.own_output else None
        self._rows = rows
        self._output = SharedOutput(rows, torch.arange(sizes.draft_vocab_size) if draft_ids is None else draft_ids)
        # Over rows of its own, by the kernels.
        self._multiplied: DraftVocabulary | None = None

    def multiply_by(self, products: HeadProducts) -> None:
        """Multiply by the kernels: its linear layers, which no longer have a weight then, and the output rows."""
        if self.lm_head is None:
            self._output.multiply_by(products)
        else:
            self._multiplied = self.vocabulary.by(products)
        products.replace_in(self, kept=(self.lm_head,))

    def _share(self, own: OnTargetRows) -> None:
        """Take the weights of another one of the same kind, and what multiplies by them."""
        take_weights(self, own)
        self._output, self._multiplied = own._output, own._multiplied

    @property
    def rows(self) -> TargetRows:
        """The target's rows that it shares."""
        return self._rows

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that it drafts for every request."""
        if self._multiplied is not None:
            return self._multiplied
        if self.lm_head is not None:
            return DraftVocabulary(ids=self._output.ids, rows=self.lm_head.weight)
        return self._output.vocabulary

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """As ``SharedOutput.beyond``. None, too, if it has trained output rows: the target's do not fit beside those."""
        return None if self.lm_head is not None and not self._frozen_output else self._output.beyond(tokens)

    @cached_property
    def _frozen_output(self) -> bool:
        """Whether its own output rows are a copy of the target's, as newer trainers save them."""
        if self.lm_head is None or self._sizes.hidden_size != self._sizes.target_hidden_size:
            return False
        own = self.lm_head.weight
        return torch.allclose(own, self._rows.output.rows(self._output.ids).to(own), rtol=1e-2, atol=1e-3)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., h_e] of target tokens [...]: its own, or the target's."""
        return self._rows.embedding.rows(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)
