"""Mamba's weight of time steps, which its mixers multiply by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from services.model_files.weights.stored_blocks import StoredLinear


class MultipliedWeight(nn.Module):
    """A linear layer whose weight and bias Mamba's mixers use by themselves; it is packed like their other parameters."""

    def __init__(self, linear: nn.Linear | StoredLinear) -> None:
        super().__init__()
        weight = linear.weight
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.float(), requires_grad=False)
        self.bias = linear.bias

    def multiply_by(self, make: Callable[[torch.Tensor, torch.Tensor | None], nn.Module]) -> None:
        """Let a layer multiply by the weight, which ``make`` makes of it; for devices where nothing is packed."""
        weight = self.weight.data
        del self.weight
        self.add_module("weight", _ByLayer(make(weight, None)))


class _ByLayer(nn.Module):
    """Stands for a weight that is multiplied by columns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __matmul__(self, columns: torch.Tensor) -> torch.Tensor:
        """[..., terms, rows] to [..., outputs, rows]."""
        made: torch.Tensor = self.layer(columns.transpose(-1, -2).contiguous())
        return made.transpose(-1, -2)
