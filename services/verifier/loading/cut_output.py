"""Leaves out rows of a model's output layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.stored_blocks import StoredLinear
from speculation.errors import ConfigurationError


def cut_output(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Let the output layer compute the logits of ``kept`` tokens alone, ascending. The embeddings stay whole.

    Raises:
        ConfigurationError: the output layer is not a plain linear one.
    """
    head, rows = model.get_output_embeddings(), torch.tensor(kept)
    made: nn.Module
    if isinstance(head, StoredLinear):
        made = StoredLinear(replace(head.weight, raw=head.weight.raw[rows]), _part(head.bias, rows))
    elif type(head) is nn.Linear:
        made = nn.Linear(head.in_features, len(kept), bias=head.bias is not None, device="meta")
        made.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
        if head.bias is not None:
            made.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    else:
        raise ConfigurationError(
            f"the output layer is {type(head).__name__}, of which no rows can be left out", about="the output layer"
        )
    model.set_output_embeddings(made)


def _part(bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.detach()[rows]
