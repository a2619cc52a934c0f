"""Begins a run from a checkpoint that exists, instead of an untrained model: more steps, other data, or another loss.

Unlike going on with an interrupted run, nothing but the weights is taken over: the schedule, the optimizer and the place in
the data begin anew.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.files.target_shape import TRAINING
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.streams.files import load_streams
from services.drafter.heads.streams.streams import Streams
from services.model_files.folder import read_json, reading
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import BLOCKS_FILE, SINGLE
from speculation.errors import ConfigurationError, spelled
from training.learner import trained
from training.open_run import OpenedModel
from training.recipe import LayersRecipe
from training.snapshots import StartRecord

_Head = FeatureHead | Streams | MedusaHeads | BlockDrafter
# How far numbers may be from the target's, over a tensor's greatest one, because they are stored in 16 bits or in blocks.
_ROUNDED = 0.01


def start_from(folder: Path, opened: OpenedModel, target: Path) -> StartRecord:
    """Give an untrained model the weights of the checkpoint in ``folder``: one of ``outrider train export``, or a head in
    any layout that drafters load. Weights in blocks begin at the numbers that the blocks stand for.

    Args:
        target: folder of the target, as it is served.

    Returns:
        what the checkpoint is, for the run's state.

    Raises:
        ConfigurationError: it is no such checkpoint, was made for another target or draft vocabulary, or has another shape
            than the recipe's model; names what differs.
    """
    weights = next((file for name in (BLOCKS_FILE, SINGLE) if (file := folder / name).is_file()), None)
    if weights is None:
        raise ConfigurationError(
            f"has neither {SINGLE} nor {BLOCKS_FILE}",
            field="--start-from",
            verb="",
            value=folder,
            allowed="a folder of outrider train export",
        )
    module = opened.learner.module
    recorded = read_json(folder / TRAINING, of="checkpoint") if (folder / TRAINING).is_file() else {}
    _check_target(recorded, opened, folder)
    if isinstance(module, _Head):
        found = _head(folder, module, opened, target)
    else:
        found = _tensors(folder, target)
        _check_layers(recorded, found, opened, folder)
    with torch.no_grad():
        for name, parameter in trained(module).items():
            tensor = found.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                has = "is missing" if tensor is None else f"is {list(tensor.shape)}"
                raise ConfigurationError(
                    f"the tensor {name} {has}",
                    field="--start-from",
                    verb="",
                    value=folder,
                    allowed=f"{list(parameter.shape)}, by the recipe",
                )
            parameter.copy_(tensor)
    before = recorded.get("start") or {}
    return StartRecord(
        weights_sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        steps=_count(recorded, "steps") + _count(before, "steps"),
        predictions=_count(recorded, "predictions") + _count(before, "predictions"),
    )


def _check_target(recorded: dict[str, Any], opened: OpenedModel, folder: Path) -> None:
    theirs, ours = recorded.get("target_weights_sha256"), opened.manifest.target.weights_sha256
    if theirs is not None and theirs != ours:
        raise ConfigurationError(
            f"was trained for a target with the hash {str(theirs)[:12]}",
            field="--start-from",
            verb="",
            value=folder,
            allowed=f"{ours[:12]}, the data's",
        )


def _head(folder: Path, module: _Head, opened: OpenedModel, target: Path) -> dict[str, torch.Tensor]:
    head: _Head
    if isinstance(module, Streams):
        head = load_streams(folder, target)
    elif isinstance(module, MedusaHeads):
        head = load_medusa(folder, target)
    elif isinstance(module, BlockDrafter):
        head = load_blocks(folder, target)
    else:
        head = load_head(folder, target)
    theirs, ours = asdict(head.config), asdict(module.config)
    for field, value in ours.items():
        # An early exit that the checkpoint lacks begins untrained.
        if theirs[field] != value and not (field == "pruning_rank" and not theirs[field]):
            raise ConfigurationError(
                place=f"--start-from {folder}",
                field=f"the head's {field}",
                value=theirs[field],
                allowed=f"{spelled(value)}, by the recipe",
            )
    if not torch.equal(head.vocabulary.ids.cpu(), torch.from_numpy(opened.vocabulary.ids)):
        raise ConfigurationError(
            "the head drafts other tokens", field="--start-from", verb="", value=folder, allowed="those of --vocabulary"
        )
    return {**module.state_dict(), **head.state_dict()}


def _check_layers(recorded: dict[str, Any], found: dict[str, torch.Tensor], opened: OpenedModel, folder: Path) -> None:
    """A draft model's weights that the run leaves as they are must be the target's in the checkpoint, too."""
    recipe = opened.recipe
    assert isinstance(recipe, LayersRecipe)
    theirs = recorded.get("recipe") or {}
    if theirs.get("kind") == recipe.kind:
        if tuple(theirs.get("layers", ())) != recipe.layers:
            raise ConfigurationError(
                f"was made of the target's layers {theirs.get('layers')}",
                field="--start-from",
                verb="",
                value=folder,
                allowed=f"{list(recipe.layers)}, by the recipe",
            )
        if theirs.get("frozen_layers", 0) < recipe.frozen_layers:
            raise ConfigurationError(
                place=f"--start-from {folder}",
                field="its frozen_layers",
                verb="are",
                value=theirs.get("frozen_layers", 0),
                allowed="at least the recipe's, or trained layers would be lost",
            )
    ours = opened.learner.module.state_dict()
    own = trained(opened.learner.module)
    for name, tensor in found.items():
        if name in own:
            continue
        kept = ours.get(name)
        if kept is None:
            raise ConfigurationError(
                f"has the tensor {name}, which the recipe's model has not", field="--start-from", verb="", value=folder
            )
        if kept.shape != tensor.shape or (kept - tensor).abs().max() > _ROUNDED * kept.abs().max():
            raise ConfigurationError(
                f"the tensor {name} is not the target's, and the recipe does not train it: it would be lost",
                field="--start-from",
                verb="",
                value=folder,
            )


def _tensors(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    with reading(f"start from {folder}", about=folder), WeightFiles(folder, target) as files:
        return {name: files.numbers(name) for name in files.names}


def _count(record: dict[str, Any], key: str) -> int:
    value = record.get(key, 0)
    return value if isinstance(value, int) else 0
