"""Mixtures of experts through transformers' experts interface: the rows of each expert in one product.

A row's experts are added up in the order of their numbers, which is the row's alone; that their products do not depend on
how many rows share an expert is up to the weights (``ExactWeight``). Mixtures that do not go through the interface multiply
by such weights in their own loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "outrider"


def experts(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """What transformers' experts classes compute; the signature is transformers'.

    Args:
        hidden_states: [rows, hidden size].
        top_k_index: [rows, experts of a row].
        top_k_weights: as ``top_k_index``.

    Returns:
        [rows, hidden size].
    """
    asked = top_k_index.flatten()
    by_expert = asked.argsort(stable=True)
    rows = by_expert // top_k_index.shape[1]
    counts = asked.bincount(minlength=self.num_experts).tolist()
    up = "gate_up_proj" if self.has_gate else "up_proj"
    made = _products(self, up, hidden_states[rows], counts)
    made = _products(self, "down_proj", self._apply_gate(made) if self.has_gate else self.act_fn(made), counts)
    if self.has_post_expert_norm:
        made = self.post_expert_norm(made)
    made = made * top_k_weights.flatten()[by_expert, None]
    # A row's experts are added one after the other, by their numbers, as transformers' own loop does.
    return torch.zeros_like(hidden_states).index_add_(0, rows, made.to(hidden_states.dtype))


def _products(module: Any, name: str, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """``counts`` rows for each expert, [rows, inputs], times their expert's weights: [rows, outputs]."""
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    made = []
    for number, given in enumerate(torch.split(rows, counts)):
        if len(given):
            own = weight[number].T if module.is_transposed else weight[number]
            made.append(functional.linear(given, own, None if bias is None else bias[number]))
    return torch.cat(made)


def use(model: nn.Module) -> None:
    """Let every layer of ``model`` that goes through the interface be computed by ``experts``."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    for module in model.modules():
        # What transformers' decorator leaves on a module.
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            module.config._experts_implementation = NAME  # type: ignore[union-attr]
