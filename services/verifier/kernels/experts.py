"""Mixtures of experts through transformers' experts interface: one product for all rows of an expert.

The results of a row's experts are added in the order of the experts' numbers, so the sum depends on the row alone. That a
product does not depend on how many rows share an expert is ensured by the weights (``ExactWeight``). Mixtures that do not
use the interface multiply by such weights in their own loops. Checkpoints may say that each expert rounds what enters it.

Ranks each compute some columns of every expert's products, for all rows: whole rows of the first are gathered before the
second, and its columns once they are added. All ranks choose the same experts, since each computes the router itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.model_files.weights.rounded_inputs import expert_inputs
from services.verifier.kernels.exact_weights import ExactWeight
from services.verifier.kernels.sharded_layers import shards_of

NAME = "outrider"
# Computes nothing, for models without weights.
_NOTING = "outrider_noting"


def experts(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Compute what transformers' experts classes compute; the signature is transformers'.

    Args:
        hidden_states: [rows, hidden size].
        top_k_index: [rows, experts per row], the number of each expert.
        top_k_weights: [rows, experts per row].

    Returns:
        [rows, hidden size].
    """
    asked, by_expert = top_k_index.flatten().sort(stable=True)
    rows = by_expert // top_k_index.shape[1]
    chosen, counts = torch.unique_consecutive(asked, return_counts=True)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    shards = shards_of(self)
    made = _products(self, up, _entering(self, up, hidden_states[rows], chosen, counts), chosen, counts)
    made = self._apply_gate(made) if self.has_gate else self.act_fn(made)
    # Ranks round whole rows, as one process does.
    made = _entering(self, "down_proj", made if shards is None else shards.columns(made), chosen, counts)
    made = _products(self, "down_proj", made, chosen, counts)
    # The oldest transformers that is taken does not have it yet.
    if getattr(self, "has_post_expert_norm", False):
        made = self.post_expert_norm(made)
    made = made * top_k_weights.flatten()[by_expert, None]
    # Added in the order of the experts' numbers, as in transformers' own loop.
    total = hidden_states.new_zeros(len(hidden_states), made.shape[1])
    total.index_add_(0, rows, made.to(hidden_states.dtype))
    return total if shards is None else shards.columns(total)


def _entering(module: Any, name: str, rows: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The rows, or what they are rounded to before they enter a product."""
    inputs = expert_inputs(module).get(name)
    return rows if inputs is None else inputs(rows, chosen, counts)


def _products(module: Any, name: str, rows: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[rows, outputs]: the rows, [rows, inputs], sorted by expert, times their expert's weights.

    Args:
        chosen: the experts that have rows, ascending.
        counts: how many each of them has.
    """
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    if isinstance(weight, ExactWeight):
        # One call of a kernel, where there are many experts with a row each.
        made = weight.numbers.sorted_product(rows, chosen, counts.cumsum(0), inputs_first=module.is_transposed)
        if made is not None:
            return made if bias is None else made + bias[chosen.repeat_interleave(counts)]
    products = []
    for number, given in zip(chosen.tolist(), torch.split(rows, counts.tolist()), strict=True):
        own = weight[number].T if module.is_transposed else weight[number]
        products.append(functional.linear(given, own, None if bias is None else bias[number]))
    return torch.cat(products)


def use(model: nn.Module) -> None:
    """Let ``experts`` compute every layer of ``model`` that uses the interface."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    _answer_by(NAME, model)


def use_noting(model: nn.Module) -> None:
    """Let every such layer of a model without weights note how many experts a row chooses, which ``chosen_by_row`` says.

    Other implementations read which experts the rows choose, which nothing says there.
    """
    ALL_EXPERTS_FUNCTIONS.register(_NOTING, _noting)
    _answer_by(_NOTING, model)


def chosen_by_row(experts: nn.Module) -> int | None:
    """How many experts of a module a row chooses; None: it has not been asked (``use_noting``)."""
    return getattr(experts, "_chosen_by_row", None)


def _answer_by(name: str, model: nn.Module) -> None:
    for module in model.modules():
        # Attributes that transformers' decorator sets on a module.
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            module.config._experts_implementation = name  # type: ignore[union-attr]


def _noting(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """As ``experts``, but for the numbers."""
    self._chosen_by_row = top_k_index.shape[-1]
    return torch.empty_like(hidden_states)
