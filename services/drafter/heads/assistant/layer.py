"""An assistant's decoder layer: Gemma 4's, with queries alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from services.drafter.heads.assistant.config import AssistantConfig, Kind
from services.drafter.heads.layer import GatedMLP, SeenRows, turned


class LookingAttention(nn.Module):
    """Attention over keys and values that others made. Scores are not divided: queries and keys are normed."""

    def __init__(self, config: AssistantConfig, kind: Kind) -> None:
        super().__init__()
        shape, size = config.looked_at[kind], config.hidden_size
        self._groups, self._width = shape.heads, shape.width
        self.q_proj = nn.Linear(size, config.num_attention_heads * shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.width, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(config.num_attention_heads * shape.width, size, bias=False)

    @override
    def forward(
        self, rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], seen: Sequence[SeenRows]
    ) -> torch.Tensor:
        """[B, R, h] to [B, R, h]; B is 1."""
        query = self.q_norm(self.q_proj(rows).unflatten(-1, (-1, self._width)))
        query = turned(query.transpose(1, 2), *turns)
        parts = torch.split(query, [part.rows for part in seen], dim=2)
        found = [self._looked(own, part) for own, part in zip(parts, seen, strict=True)]
        written: torch.Tensor = self.o_proj(torch.cat(found, dim=2).transpose(1, 2).flatten(2))
        return written

    def _looked(self, query: torch.Tensor, part: SeenRows) -> torch.Tensor:
        used = self._groups * self._width
        keys, values = (
            each[:, :used].view(len(each), self._groups, self._width).transpose(0, 1)[None]
            for each in (part.keys, part.values)
        )
        # Heads that share keys are rows of one product. Behind its keys, each row says whether it is hidden.
        asked = query.reshape(1, self._groups, -1, self._width)
        mask = part.keys[:, -1].expand(part.rows, -1)
        if part.mask is not None:
            mask = mask.masked_fill(~part.mask, -torch.inf)
        mask = mask.repeat(query.shape[1] // self._groups, 1)
        return functional.scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=1.0).reshape(query.shape)


class AssistantLayer(nn.Module):
    """A layer: norms before and behind attention and MLP, and one factor on all that it gives."""

    layer_scalar: torch.Tensor

    def __init__(self, config: AssistantConfig, kind: Kind) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.kind = kind
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = LookingAttention(config, kind)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(config, size, bias=False)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=torch.float32))

    @override
    def forward(
        self, rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], seen: Sequence[SeenRows]
    ) -> torch.Tensor:
        """[B, R, h] to [B, R, h]."""
        rows = rows + self.post_attention_layernorm(self.self_attn(self.input_layernorm(rows), turns, seen))
        normed = self.pre_feedforward_layernorm(rows)
        rows = rows + self.post_feedforward_layernorm(self.mlp(normed, normed))
        made: torch.Tensor = rows * self.layer_scalar
        return made
