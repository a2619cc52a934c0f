"""DFlash2's decoder layer: short convolutions along the block before and after attention, and before and after the MLP.

A row's kernel has a part that is learnt for each number, and a part that the row itself gives for a group of numbers. It
joins the row with those before it in its own block.
"""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.blocks.config import BlockConfig
from services.drafter.heads.layer import Attend, HeadLayer


class BlockConvolution(nn.Module):
    """The two convolutions around one part of a layer; the row before the part gives the kernels of both."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, kernel = config.layer.hidden_size, config.conv_kernel_size
        self._block, self._group = config.block_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel, size, dtype=torch.float32))
        self.kernel_projection = nn.Linear(size, 2 * kernel * (size // self._group), bias=False)

    def before(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, R, h], whole blocks, convolved; and [B, R, kernel, groups], what ``after`` takes."""
        kernels = self.kernel_projection(rows).view(*rows.shape[:2], 2, self.base_kernel.shape[1], -1)
        return self._convolved(rows, kernels[:, :, 0], self.base_kernel[0]), kernels[:, :, 1]

    def after(self, rows: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """[B, R, h] convolved."""
        return self._convolved(rows, kernels, self.base_kernel[1])

    def _convolved(self, rows: torch.Tensor, kernels: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        size = rows.shape[-1]
        blocks = rows.reshape(-1, self._block, size)
        whole = kernels.repeat_interleave(self._group, dim=-1).reshape(-1, self._block, len(base), size) + base
        made = torch.zeros_like(blocks)
        for back in range(len(base)):
            earlier = nn.functional.pad(blocks, (0, 0, back, 0))[:, : self._block]
            made = made + whole[:, :, back] * earlier
        return made.view_as(rows)


class ConvolvedLayer(HeadLayer):
    """Decoder layer ``number`` of DFlash2."""

    def __init__(self, config: BlockConfig, number: int) -> None:
        super().__init__(config.layer, number)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    @override
    def forward(
        self, rows: torch.Tensor, embeddings: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """[B, R, h], whole blocks, to [B, R, h]."""
        assert self.input_layernorm is not None
        inner, kernels = self.attention_conv.before(self.input_layernorm(rows))
        rows = rows + self.attention_conv.after(self.self_attn(inner, turns, attend), kernels)
        inner, kernels = self.mlp_conv.before(self.post_attention_layernorm(rows))
        added: torch.Tensor = rows + self.mlp_conv.after(self.mlp(inner, inner), kernels)
        return added
