"""The layers of a model that LoRA adapters may add to: found in a trial pass, by how they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.loading.peft_folder import AdaptableLayer


@contextmanager
def noting_layers(model: PreTrainedModel, rows: int) -> Iterator[dict[str, nn.Module]]:
    """Note, in a pass over so many rows that reads all logits, the linear layers and the embedding that take all rows, once:
    by name, after the pass.
    """
    calls: dict[str, list[bool]] = {}
    found: dict[str, nn.Module] = {}

    def note(name: str, module: nn.Module, given: tuple[Any, ...], made: object) -> None:
        shape = given[0].shape if given else ()
        # An embedding is given numbers of tokens.
        leading = tuple(shape if isinstance(module, nn.Embedding) else shape[:-1])
        calls.setdefault(name, []).append(leading in ((1, rows), (rows,)) and isinstance(made, torch.Tensor))

    modules = {
        name: module
        for name, module in model.named_modules()
        # What layers share their product by, or round for, is none of the model's own modules.
        if (hasattr(module, "in_features") and not name.endswith((".packed", ".after_rounding")))
        or _is_embedding(module, model)
    }
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found.update((name, modules[name]) for name, seen in calls.items() if seen == [True])


def described(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, AdaptableLayer]:
    """What adapters have to fit, by the names of the modules."""
    tied = model.all_tied_weights_keys
    return {
        name: _described(module, tied.get(f"{name}.weight", "").removesuffix(".weight")) for name, module in modules.items()
    }


def _described(module: Any, tied_to: str) -> AdaptableLayer:
    if isinstance(module, nn.Embedding):
        return AdaptableLayer(inputs=module.num_embeddings, outputs=module.embedding_dim, is_embedding=True)
    return AdaptableLayer(inputs=module.in_features, outputs=module.out_features, tied_to=tied_to)


def _is_embedding(module: nn.Module, model: PreTrainedModel) -> bool:
    return isinstance(module, nn.Embedding) and module is model.get_input_embeddings()
