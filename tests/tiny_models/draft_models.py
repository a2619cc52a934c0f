"""Tiny draft models for tests: a copy of a tiny target with disturbed weights, which is right now and then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from training.export import leave_out_shared
from training.recipe import LayersRecipe

FIRST_LAYER = LayersRecipe(kind="draft_model", layers=(0, 1), frozen_layers=1)


def make_tiny_draft(target: Path, folder: Path, disturbed: float = 0.05) -> Path:
    """Copy a model to ``folder`` (unless it is there), each weight multiplied by 1 + ``disturbed`` x normal noise."""
    if not folder.is_dir():
        shutil.copytree(target, folder)
        generator = torch.Generator().manual_seed(1)
        weights = load_file(folder / "model.safetensors")
        for name, weight in weights.items():
            weights[name] = weight * (1 + disturbed * torch.randn(weight.shape, generator=generator))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_broken_draft(target: Path, folder: Path) -> Path:
    """Copy a model to ``folder``, with a weight that is not a number: nothing but reading it shows that."""
    make_tiny_draft(target, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_parallel_draft(target: Path, folder: Path, mask: int = 300) -> Path:
    """Such a copy with a mask token, as PARD's models have one; untrained, so that masks guess nothing of use."""
    make_tiny_draft(target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": mask}))
    return folder


def draft_beside(target: Path, disturbed: float = 0.05) -> Path:
    """Such a draft model in a folder beside the target's, made once."""
    return make_tiny_draft(target, target.parent / f"{target.name}-draft-{disturbed}", disturbed)


def make_sharing_draft(target: Path, folder: Path, recipe: LayersRecipe = FIRST_LAYER) -> tuple[Path, Path]:
    """A draft model with the target's embeddings, output layer and frozen layers: whole, and without these."""
    whole, own = make_tiny_draft(target, folder / "whole"), folder / "own"
    weights, theirs = load_file(whole / "model.safetensors"), load_file(target / "model.safetensors")
    frozen = {
        f"model.layers.{number}": f"model.layers.{of}" for number, of in enumerate(recipe.layers[: recipe.frozen_layers])
    }
    for name in weights:
        layer = ".".join(name.split(".")[:3])
        if layer in frozen or "embed" in name or "lm_head" in name:
            weights[name] = theirs[name.replace(layer, frozen.get(layer, layer))].clone()
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(own)
    leave_out_shared(own, model, recipe, target)
    return whole, own
