"""Puts the kernels of ``row_products`` into a transformers model."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import nn

from services.verifier.triton_kernels.row_products import RowLinear, gated, normalise

# Norms that are ``weight`` times the normalised row, by class; those of other families add one to the weight, or more.
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
_FORWARDS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")


class _Norm(Protocol):
    weight: torch.Tensor
    variance_epsilon: float


class RowNorm(nn.Module):
    """Replaces a norm of ``_NORMS``."""

    def __init__(self, norm: _Norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach(), requires_grad=False)
        self._eps = norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]."""
        return normalise(rows, None, self.weight, self._eps)[0]


class RowFeedForward(nn.Module):
    """Replaces a feed-forward part of ``_FORWARDS`` with SiLU and without biases; gate and up are one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self._gate_up = RowLinear(torch.cat([gate.weight, up.weight]))
        self._down = RowLinear(down.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]."""
        made: torch.Tensor = self._down(gated(self._gate_up(rows)))
        return made


def use_row_kernels(model: nn.Module) -> list[str]:
    """Replace the layers for which there are kernels; returns the kinds of the other modules that hold weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            if kind in _FORWARDS and isinstance(getattr(child, "act_fn", None), nn.Module) and _is_gated_silu(child):
                parts = [cast(nn.Linear, child.get_submodule(part)) for part in ("gate_proj", "up_proj", "down_proj")]
                setattr(parent, name, RowFeedForward(*parts))
            elif kind in _NORMS:
                setattr(parent, name, RowNorm(cast(_Norm, child)))
            elif type(child) is nn.Linear and type(parent).__name__ not in _FORWARDS:
                setattr(parent, name, RowLinear(child.weight, child.bias))
    ours = (RowLinear, RowNorm, nn.Embedding)
    left = {type(module).__name__ for module in model.modules() if module._parameters and not isinstance(module, ours)}
    return sorted(left)


def _is_gated_silu(module: nn.Module) -> bool:
    parts = [module.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")]
    silu = type(module.get_submodule("act_fn")).__name__ in ("SiLU", "SiLUActivation")
    return silu and all(type(part) is nn.Linear and part.bias is None for part in parts)
