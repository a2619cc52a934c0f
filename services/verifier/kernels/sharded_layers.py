"""Layers of which one rank holds a shard: what they are given and give is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

if TYPE_CHECKING:
    # Not imported: a bare machine (benchmarks/gpu_check) lacks what they need.
    from services.model_files.weights.rounded_inputs import RoundedLinear
    from services.model_files.weights.stored_blocks import StoredLinear
    from services.verifier.stages.stage_ranks import StageRanks


class ShardedLinear(nn.Module):
    """A linear layer behind which rows are whole: own columns of the product, then those of all ranks.

    Args:
        own: of this rank, [columns of it, in_features].
        gathers: whether rows arrive in shards as well, such as what a rank's heads have made.
    """

    def __init__(self, own: nn.Linear | StoredLinear | RoundedLinear, shards: StageRanks, *, gathers: bool) -> None:
        super().__init__()
        self.own: nn.Module = own
        self.shards, self._gathers = shards, gathers
        self.in_features, self.out_features = own.in_features, own.out_features * shards.count

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features], or this rank's part of them, to [..., out_features]."""
        return self.shards.columns(self.own(self.shards.columns(rows) if self._gathers else rows))


class ShardedOutput(ShardedLinear):
    """The output layer, of which a rank holds its part of the vocabulary.

    Attributes:
        whole: whether rows behind it are; else they have this rank's logits alone.
    """

    whole = True

    def __init__(self, own: nn.Linear | StoredLinear | RoundedLinear, shards: StageRanks) -> None:
        super().__init__(own, shards, gathers=False)

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], or to this rank's part of them."""
        made: torch.Tensor = super().forward(rows) if self.whole else self.own(rows)
        return made


class ShardedEmbedding(nn.Module):
    """Embeddings of which a rank holds those of its part of the vocabulary."""

    def __init__(self, own: nn.Embedding, shards: StageRanks) -> None:
        super().__init__()
        self.own, self._shards = own, shards

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] ids to [..., hidden size]: each row is a copy of its owner's.

        Raises:
            IndexError: an id is not in the vocabulary.
        """
        size = self.own.num_embeddings
        # What others own is looked up as well, since all give as much. Different tokens then have different rows: until
        # ranks are connected, a model of equal rows would pass every trial of attention.
        rows = self._shards.rows(self.own(tokens % size))
        return rows.flatten(1, -2)[tokens.flatten() // size, torch.arange(tokens.numel(), device=tokens.device)].view(
            *tokens.shape, -1
        )


def share_experts(experts: nn.Module, shards: StageRanks) -> None:
    """Let what computes a module of experts exchange columns with the other ranks: this one holds its part of all experts.

    Noted at the module, since the functions that compute experts are given that, and read its parameters.
    """
    experts._shards = shards  # type: ignore[assignment]


def shards_of(experts: nn.Module) -> StageRanks | None:
    """The ranks that share a module of experts; None: it is whole."""
    return getattr(experts, "_shards", None)


def own_part(module: nn.Module) -> nn.Module:
    """What this rank computes of a layer: all of it, where ranks have no shards of it."""
    return module.own if isinstance(module, ShardedLinear | ShardedEmbedding) else module
