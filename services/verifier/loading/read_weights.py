"""Reads a model's weights into a skeleton, by their names in the whole model: all of a weight, or a rank's part of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.files import WeightFiles
from services.model_files.weights.stacked_blocks import AnyWeight, StackedBlocks, any_numbers
from services.model_files.weights.stored_blocks import StoredBlocks, StoredLinear
from services.verifier.kernels.exact_weights import ExactWeight, Numbers
from services.verifier.loading.complete import mismatched, missing
from services.verifier.loading.joined_weights import JoinedWeights
from services.verifier.loading.layer_names import LayerNames
from services.verifier.stages.stage_ranks import Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedWeights:
    """Which weights a skeleton gets, and how.

    Attributes:
        folder, target: see ``WeightFiles``.
        dtype: in which they are held.
        stored: linear layers and experts keep theirs as stored.
        names: where the skeleton has some of the layers; None: it is the whole model's.
        cuts: of some weights, by their names in the skeleton, the part that is wanted.
    """

    folder: Path
    target: Path | None
    dtype: torch.dtype
    stored: bool
    names: LayerNames | None
    cuts: Mapping[str, Cut]


def read_weights(model: PreTrainedModel, wanted: WantedWeights) -> None:
    """Load the weights that a skeleton still has.

    Raises:
        ConfigurationError: a weight is missing, or has another shape.
    """
    folder, tied = wanted.folder, model.all_tied_weights_keys
    state: dict[str, torch.Tensor] = {}
    lacking: list[str] = []
    sources: dict[str, tuple[str, Cut | None]] = {}
    places = {
        name: (name if wanted.names is None else wanted.names.in_whole(name), place)
        for name, place in model.state_dict().items()
    }
    with WeightFiles(folder, wanted.target) as opened:
        files = JoinedWeights(opened, model, {*(stored for stored, _ in places.values()), *tied.values()})
        for name, (stored, place) in places.items():
            if stored not in files:
                stored = tied.get(stored, stored)
            if stored not in files:
                lacking.append(stored)
                continue
            shape, cut = tuple(place.shape), wanted.cuts.get(name)
            whole = shape if cut is None else cut.whole_shape(shape)
            if files.shape(stored) != whole:
                raise mismatched(stored, files.shape(stored), whole, folder)
            weight, sources[name] = files.get(stored, cut), (stored, cut)
            if wanted.stored and _make_room(model, name, weight):
                continue
            state[name] = _as_tensor(weight, name, model, wanted)
    if lacking:
        raise missing(model, lacking, folder)
    # What has weights in blocks has no torch weight any more, so strict loading would fail.
    model.load_state_dict(state, assign=True, strict=False)
    _tie(model, sources)


def _tie(model: PreTrainedModel, sources: Mapping[str, tuple[str, Cut | None]]) -> None:
    """Let weights of one source, and of one type, be one, as transformers has those that layers share."""
    first: dict[tuple[str, Cut | None, torch.dtype | None], nn.Parameter | StoredBlocks] = {}
    for name, source in sources.items():
        module, _, own = name.rpartition(".")
        held = getattr(model.get_submodule(module), own)
        if isinstance(held, nn.Parameter | StoredBlocks):
            one = first.setdefault((*source, held.dtype if isinstance(held, nn.Parameter) else None), held)
            setattr(model.get_submodule(module), own, one)


def _linear(model: PreTrainedModel, weight_name: str) -> tuple[nn.Module, str] | None:
    """Parent and name of the linear layer that has the weight; None: it is not the weight of a linear layer."""
    if not weight_name.endswith(".weight"):
        return None
    parent_name, _, own = weight_name.removesuffix(".weight").rpartition(".")
    parent = model.get_submodule(parent_name)
    return (parent, own) if type(getattr(parent, own, None)) is nn.Linear else None


def _make_room(model: PreTrainedModel, name: str, weight: AnyWeight) -> bool:
    """Let the model keep a weight in blocks; False: it is none, or belongs to no linear layer and no experts."""
    if isinstance(weight, StackedBlocks):
        module, _, own = name.rpartition(".")
        keep_blocks(model.get_submodule(module), own, weight)
        return True
    if not isinstance(weight, StoredBlocks) or (place := _linear(model, name)) is None:
        return False
    parent, own = place
    setattr(parent, own, StoredLinear(weight, getattr(parent, own).bias))
    return True


def keep_blocks(module: nn.Module, name: str, weight: StackedBlocks) -> None:
    """Replace a parameter by experts' matrices in blocks, which are packed like other weights that modules multiply by."""
    numbers = Numbers(owner=type(module).__name__, shape=torch.Size(weight.shape), stored=weight)
    delattr(module, name)
    setattr(module, name, ExactWeight.whole(numbers))


def _as_tensor(weight: AnyWeight, name: str, model: PreTrainedModel, wanted: WantedWeights) -> torch.Tensor:
    if isinstance(weight, StoredBlocks | StackedBlocks):
        return any_numbers(weight).to(wanted.dtype)
    if weight.dtype == torch.bfloat16 and wanted.stored and _linear(model, name) is not None:
        return weight
    # As transformers loads them; a few weights must not be rounded, such as those that DeepSeek chooses experts by.
    kept = any(_named(pattern, name) for pattern in model._keep_in_fp32_modules_strict or ())
    return weight.to(torch.float32 if kept else wanted.dtype)


def _named(pattern: str, name: str) -> bool:
    return re.search(rf"(?:^|\.){pattern}(?:\.|$)", name) is not None
