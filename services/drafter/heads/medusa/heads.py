"""Medusa-1's heads (Cai et al., 2401.10774, section 2.1.1): each guesses a token further ahead from the target's last state.

Head i (from 0) reads the state of position t behind the final norm and predicts token t + 2 + i; the target's own output
layer predicts token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.draft_vocabulary import DraftVocabulary, SharedOutput
from services.drafter.heads.medusa.config import MedusaConfig
from services.drafter.heads.products import HeadProducts


class ResBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., h] to [..., h]."""
        return rows + nn.functional.silu(self.linear(rows))


class MedusaHeads(nn.Module):
    """The heads. Their parameters are what was trained."""

    def __init__(self, config: MedusaConfig, output: SharedOutput) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(size, config.bias) for _ in range(config.num_blocks))) for _ in range(config.num_heads)
        )
        own = [nn.Linear(size, config.draft_vocab_size, bias=False) for _ in range(config.num_outputs)]
        self.outputs = nn.ModuleList(own) if own else None
        self.output = output
        # What multiplies by the rows of ``outputs``, instead of these.
        self._scored: nn.ModuleList | None = None

    def multiply_by(self, products: HeadProducts) -> None:
        """Multiply by the kernels: the heads, whose linear layers no longer have a weight then, and the output rows."""
        products.replace_in(self.heads)
        if self.outputs is None:
            self.output.multiply_by(products)
        else:
            self._scored = nn.ModuleList(products.over(each.get_parameter("weight")) for each in self.outputs)

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that it drafts for every request; its ``rows`` are the first head's, if heads have their own."""
        if self.outputs is None:
            return self.output.vocabulary
        first = self.outputs[0]
        assert isinstance(first, nn.Linear)
        return DraftVocabulary(ids=self.output.ids, rows=first.weight)

    def beyond(self, tokens: Iterable[int]) -> DraftVocabulary | None:
        """As ``SharedOutput.beyond``; None, too, if heads have output layers of their own."""
        return None if self.outputs is not None else self.output.beyond(tokens)

    @override
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[n, h], the target's states behind its final norm, to [n, heads, h], what the output layers read."""
        return torch.stack([head(states) for head in self.heads], dim=1)

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """[n * heads, h], in the heads' order, to [n * heads, V_d]."""
        outputs = self.outputs if self._scored is None else self._scored
        if outputs is None:
            return self.output.logits(hidden, vocabulary)
        if len(outputs) == 1:
            shared: torch.Tensor = outputs[0](hidden)
            return shared
        by_head = hidden.view(-1, len(outputs), hidden.shape[-1])
        return torch.stack([output(by_head[:, head]) for head, output in enumerate(outputs)], dim=1).flatten(0, 1)
