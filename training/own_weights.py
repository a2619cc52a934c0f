"""Leaves out of a saved draft model what is its target's own: embeddings, output layer, and layers that were not trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from services.model_files.folder import read_json
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import SINGLE
from services.model_files.weights.shared import SHARED, SharedWeights
from speculation.files import write_whole
from training.recipe import LayersRecipe


def leave_out_shared(out: Path, model: PreTrainedModel, recipe: LayersRecipe, target: Path) -> None:
    """Rewrite the folder ``out``, where ``model`` was saved, without the target's own weights: its config.json names them.

    Args:
        target: folder of the target, as it is served.

    Raises:
        ConfigurationError: the target's files have other names for these weights.
    """
    modules = dict(_shared_modules(model, recipe))
    with WeightFiles(target) as files:
        shared = SharedWeights(target, modules, "").names((), files.names)
        digest = files.digest(shared.values())
    weights = {name: weight for name, weight in load_file(out / SINGLE).items() if name not in shared}
    save_file(weights, out / SINGLE, metadata={"format": "pt"})
    config = read_json(out / "config.json") | {SHARED: {"modules": modules, "sha256": digest}}
    write_whole(out / "config.json", json.dumps(config, indent=2).encode())


def _shared_modules(model: PreTrainedModel, recipe: LayersRecipe) -> Iterator[tuple[str, str]]:
    """Names of the modules that were not trained, in the model and in its target."""
    tied = {name.rpartition(".")[0] for name in model.all_tied_weights_keys}
    untrained = (model.get_input_embeddings(), model.get_output_embeddings())
    layers = model.base_model.layers
    for name, module in model.named_modules():
        if any(module is each for each in untrained) and name not in tied:
            yield name, name
        elif module is layers:
            yield from (
                (f"{name}.{own}", f"{name}.{layer}") for own, layer in enumerate(recipe.layers[: recipe.frozen_layers])
            )
