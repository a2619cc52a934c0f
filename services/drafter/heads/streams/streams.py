"""Speculative streams over a frozen target (Bhendawade et al., 2402.11131), in the form that leaves the target untouched.

Stream j of position t starts from the state that the target's layer N - Ns - 1 made at t, plus a trained embedding P_j. It
runs through the target's own last Ns layers at position t + j, sees the main rows up to t and t's own streams up to j, and
predicts token t + 1 + j; the main row predicts token t + 1. Low-rank adapters on q, v, o and down act on streams alone. The
paper's adapters act on main rows, too (``StreamsConfig.shared``): they change what the target says, and no verifier takes
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.draft_vocabulary import DraftVocabulary, SharedOutput
from services.drafter.heads.layer import Attend
from services.drafter.heads.streams.config import ADAPTED, PRUNING, StreamsConfig
from services.drafter.heads.streams.own_layers import OwnLayers


@dataclass(slots=True)
class _Pass:
    """The pass under way.

    Attributes:
        adapted: how many of its rows, the last ones, adapters act on.
    """

    adapted: int = 0


class AdaptedLinear(nn.Module):
    """One of the target's linear layers, with a low-rank adapter for the rows of streams."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, under_way: _Pass) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)
        self._scale = scale
        self._pass = under_way

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., R, in] to [..., R, out]."""
        made: torch.Tensor = self.base(rows)
        first = rows.shape[-2] - self._pass.adapted
        if first == rows.shape[-2]:
            return made
        added = self.lora_B(self.lora_A(rows[..., first:, :])) * self._scale
        return torch.cat((made[..., :first, :], made[..., first:, :] + added), dim=-2)


class ExitAdapter(nn.Module):
    """The adapter of the early exit: an inner state to one that final norm and output layer read (o_theta, section 3.2.3).

    The paper does not print its formula. Here it adds a term of low rank to the state, which begins as zero.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(size, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, size, bias=False, dtype=torch.float32)

    @override
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., h] to [..., h]."""
        added: torch.Tensor = self.lora_B(self.lora_A(states))
        return states + added


class Streams(nn.Module):
    """Stream embeddings and adapters, which are trained, around the target's layers, which are not.

    Args:
        own: the target's last layers; its linear layers are wrapped.
    """

    def __init__(self, config: StreamsConfig, own: OwnLayers, output: SharedOutput) -> None:
        super().__init__()
        self.config = config
        self.stream_embeddings = nn.Parameter(torch.zeros(config.num_streams, config.hidden_size, dtype=torch.float32))
        self._pass = _Pass()
        for layer in own.layers:
            for name in ADAPTED:
                parent, _, child = name.rpartition(".")
                part = layer.get_submodule(parent)
                adapted = AdaptedLinear(getattr(part, child), config.rank, config.alpha / config.rank, self._pass)
                setattr(part, child, adapted)
        self.own = own
        self.output = output
        self.pruning = ExitAdapter(config.hidden_size, config.pruning_rank) if config.pruning_rank else None

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters, by their names in a checkpoint: layers are counted as the target's."""
        yield "stream_embeddings", self.stream_embeddings
        first = self.config.target_layers - self.config.num_layers
        for number, layer in enumerate(self.own.layers):
            for name in ADAPTED:
                adapted = layer.get_submodule(name)
                for part, weight in adapted.named_parameters():
                    if not part.startswith("base."):
                        yield f"layers.{first + number}.{name}.{part}", weight
        if self.pruning is not None:
            for part, weight in self.pruning.named_parameters():
                yield f"{PRUNING}.{part}", weight

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that it drafts for every request."""
        return self.output.vocabulary

    def logits(self, hidden: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
        """[..., h] to [..., V_d]."""
        return self.output.logits(hidden, vocabulary)

    def inputs(self, states: torch.Tensor) -> torch.Tensor:
        """[n, h], states of ``config.state_layer``, to [n, gamma, h], the rows that their streams begin with."""
        return states[:, None] + self.stream_embeddings

    def early(self, states: torch.Tensor) -> torch.Tensor | None:
        """What the output layer reads by an early exit from states [..., h] of ``config.state_layer``; None: it has none."""
        if self.pruning is None:
            return None
        normed: torch.Tensor = self.own.norm(self.pruning(states))
        return normed

    @override
    def forward(self, rows: torch.Tensor, positions: torch.Tensor, attend: Attend, *, streams: int) -> torch.Tensor:
        """One pass over main rows and, behind them, rows of streams.

        Args:
            rows: [B, R, h]; of main rows the target's states, of streams what ``inputs`` gives.
            positions: [B, R] int64.
            attend: which rows each row sees; see ``Attend``. It keeps keys and values, if anyone does.
            streams: how many of the R rows are streams.

        Returns:
            [B, R, h], what the output layer reads.
        """
        self._pass.adapted = rows.shape[1] if self.config.shared else streams
        hidden: torch.Tensor = self.own(rows, positions, attend)
        return hidden

    def layer(
        self, number: int, rows: torch.Tensor, positions: torch.Tensor, attend: Attend, *, streams: int
    ) -> torch.Tensor:
        """What one of the layers alone makes of rows [B, R, h], as in ``forward``."""
        self._pass.adapted = rows.shape[1] if self.config.shared else streams
        return self.own.layer(number, rows, positions, attend)
