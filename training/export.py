"""Writes what a run has trained as a checkpoint that drafters, and other servers, load."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.target_shape import TRAINING, read_target_shape
from services.drafter.heads.medusa.files import save_medusa
from services.drafter.heads.medusa.heads import MedusaHeads
from services.drafter.heads.streams.files import save_streams
from services.drafter.heads.streams.streams import Streams
from services.model_files.folder import read_json
from services.model_files.weights.files import WeightFiles, quantize_folder
from services.model_files.weights.headers import SINGLE
from services.model_files.weights.shared import SHARED, SharedWeights
from speculation.errors import ConfigurationError
from speculation.files import write_whole
from training.block_writing import BlockLayout, save_blocks
from training.curves import loss_curves
from training.head_writing import save_head
from training.open_run import OpenedModel, TrainingTarget, reopen
from training.recipe import AnyRecipe, BlockRecipe, LayersRecipe
from training.snapshots import RunState, find_snapshot, read_snapshot, run_of
from training.vocabulary import write_vocabulary


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


def check_new_folder(out: Path) -> None:
    """Check that nothing lies where a drafter is to be written.

    Raises:
        ConfigurationError: something does.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigurationError("holds other things; name a new folder", field="--out", verb="", value=out)


Dtype = Literal["bfloat16", "float16", "float32", "int8"]
EVALUATION = "evaluation.json"


def export_run(
    folder: Path,
    target: TrainingTarget,
    out: Path,
    dtype: Dtype = "bfloat16",
    *,
    own_weights: bool = False,
    layout: BlockLayout | None = None,
) -> Path:
    """Write the best checkpoint of a run, or the one that ``folder`` is, to the new folder ``out``.

    A head is written in EAGLE's, EAGLE-3's, FSPAD's or Medusa's layout, without the target's own rows; streams without its
    layers; a block drafter in DSpark's or DFlash's layout, or the speculators library's; a draft model in transformers'
    layout, whole, with the target's tokenizer and the draft vocabulary. ``training.json`` says how it was made. int8 keeps
    matrices in blocks of 32 numbers with a scale each, which only Outrider reads.

    Args:
        own_weights: of a draft model, leave out what is the target's own; only Outrider reads that.
        layout: of a block drafter; None: its authors'.

    Returns:
        the checkpoint.

    Raises:
        ConfigurationError: ``out`` holds something, there is no checkpoint, it does not fit the target, or is of another
            kind than ``own_weights`` or ``layout`` is for.
        OSError: a file cannot be written; nothing of ``out`` stays.
    """
    check_new_folder(out)
    snapshot = find_snapshot(folder)
    run = run_of(snapshot)
    state, tensors, _ = read_snapshot(snapshot)
    opened = reopen(run, state, tensors, target, "cpu")
    recipe = opened.recipe
    _check_form(recipe, dtype, own_weights, layout)
    record = _record(opened, state, snapshot)
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        building.chmod(0o755)
        module = opened.learner.module
        # Blocks are made of the numbers as they were trained.
        stored = torch.float32 if dtype == "int8" else getattr(torch, dtype)
        layers = read_target_shape(target.folder).num_layers
        if isinstance(module, FeatureHead):
            save_head(module, building, record, target_layers=layers, dtype=stored)
        elif isinstance(module, BlockDrafter):
            name = opened.manifest.target.name
            layout = layout or "authors"
            save_blocks(module, building, record, target_name=name, target_layers=layers, layout=layout, dtype=stored)
        elif isinstance(module, Streams):
            save_streams(module, building, record, dtype=stored)
        elif isinstance(module, MedusaHeads):
            save_medusa(module, building, record, dtype=stored, target_name=opened.manifest.target.name)
        else:
            _save_model(module, opened, building, target, record, stored, whole=not own_weights)
            if isinstance(recipe, LayersRecipe) and own_weights:
                leave_out_shared(building, module, recipe, target.folder)
        if dtype == "int8":
            quantize_folder(building)
        for file in building.iterdir():
            # safetensors leaves its files to their owner alone, and a server may be another user.
            file.chmod(0o644)
        if out.exists():
            out.rmdir()
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return snapshot


def _check_form(recipe: AnyRecipe, dtype: Dtype, own_weights: bool, layout: BlockLayout | None) -> None:
    if own_weights and not isinstance(recipe, LayersRecipe):
        raise ConfigurationError(
            f"--own-weights is for draft models, and this is a run of the kind {recipe.kind}: leave it out",
            about="--own-weights",
        )
    if layout is not None and not isinstance(recipe, BlockRecipe):
        raise ConfigurationError(
            f"--layout is for block drafters, and this is a run of the kind {recipe.kind}: leave it out", about="--layout"
        )
    if layout == "speculators" and dtype == "int8":
        raise ConfigurationError(
            "the speculators library knows no such blocks",
            field="--dtype",
            verb="",
            value=dtype,
            allowed="bfloat16, float16 or float32 with --layout speculators",
        )


def _save_model(
    module: Any,
    opened: OpenedModel,
    out: Path,
    target: TrainingTarget,
    record: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    whole: bool,
) -> None:
    module.to(dtype).save_pretrained(out)
    for file in target.folder.iterdir():
        if whole and file.name.startswith(("tokenizer", "chat_template", "special_tokens", "vocab", "merges")):
            shutil.copy(file, out)
    write_vocabulary(out, opened.vocabulary)
    write_whole(out / TRAINING, json.dumps(record, indent=2).encode())


def _record(opened: OpenedModel, state: RunState, snapshot: Path) -> dict[str, Any]:
    manifest = opened.manifest
    evaluation = snapshot / EVALUATION
    return {
        "target": manifest.target.name,
        "target_weights_sha256": manifest.target.weights_sha256,
        "tokenizer_sha256": manifest.target.tokenizer_sha256,
        "recipe": state.recipe,
        "steps": state.step,
        "predictions": state.rows,
        "epochs": state.epoch,
        "start": None if state.start is None else state.start.model_dump(),
        "data": {
            "sequences": state.sequences,
            "domains": list(manifest.domains),
            "given": list(manifest.given),
            "prompts_sha256": manifest.prompts_sha256,
            "sampling": manifest.sampling.model_dump(),
        },
        "vocabulary": opened.vocabulary.record.model_dump(),
        "validation_score": state.best_score if state.best_step == state.step else None,
        "losses": loss_curves(run_of(snapshot), state.step),
        "evaluation": json.loads(evaluation.read_text()) if evaluation.is_file() else None,
    }
