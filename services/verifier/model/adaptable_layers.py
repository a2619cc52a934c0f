"""The layers of a model that LoRA adapters may add to: found in a trial pass, by how they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.kernels.sharded_layers import own_part
from services.verifier.loading.peft_folder import AdaptableLayer
from services.verifier.stages.stage_ranks import Cut


@contextmanager
def noting_layers(model: PreTrainedModel, rows: int) -> Iterator[dict[str, nn.Module]]:
    """Note, in a pass over so many rows that reads all logits, the linear layers and the embedding that take all rows, once:
    by name, after the pass. Of a layer that ranks share it is the part that this one holds.
    """
    calls: dict[str, list[bool]] = {}
    found: dict[str, nn.Module] = {}

    def note(name: str, module: nn.Module, given: tuple[Any, ...], made: object) -> None:
        shape = given[0].shape if given else ()
        # An embedding is given numbers of tokens.
        leading = tuple(shape if isinstance(module, nn.Embedding) else shape[:-1])
        calls.setdefault(name, []).append(leading in ((1, rows), (rows,)) and isinstance(made, torch.Tensor))

    modules = dict(_multiplying(model))
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found.update((name, modules[name]) for name, seen in calls.items() if seen == [True])


def _multiplying(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    embedding = model.get_input_embeddings()
    parts = {id(own_part(module)): name for name, module in model.named_modules() if own_part(module) is not module}
    for name, module in model.named_modules():
        # What layers share their product by, or round for, is none of the model's own modules.
        multiplies = hasattr(module, "in_features") and not name.endswith((".packed", ".after_rounding"))
        is_embedding = isinstance(module, nn.Embedding) and module is own_part(embedding)
        if own_part(module) is module and (multiplies or is_embedding):
            yield parts.get(id(module), name), module


def described(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], cuts: Mapping[str, Cut]
) -> dict[str, AdaptableLayer]:
    """What adapters of the whole layers have to fit, by the names of the modules in the whole model.

    Args:
        cuts: of those that ranks share, the part that this one holds, likewise.
    """
    tied = model.all_tied_weights_keys
    return {
        name: _described(module, tied.get(f"{name}.weight", "").removesuffix(".weight"), cuts.get(name))
        for name, module in modules.items()
    }


def _described(module: Any, tied_to: str, cut: Cut | None) -> AdaptableLayer:
    if isinstance(module, nn.Embedding):
        inputs = module.num_embeddings if cut is None else cut.whole
        return AdaptableLayer(inputs=inputs, outputs=module.embedding_dim, is_embedding=True)
    outputs = module.out_features if cut is None else cut.whole
    return AdaptableLayer(inputs=module.in_features, outputs=outputs, tied_to=tied_to)
