"""A folder of each kind of model that drafts, for one tiny target, and settings that name them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from cluster.models import drafters as draft_models
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings, load
from services.drafter.heads.files.kinds import Checkpoint
from tests.tiny_models import head_checkpoints as made
from tests.tiny_models.head_checkpoints import LAYERS
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_blocks, make_medusa, make_streams, make_uno

EAGLE3_LAYERS = (1, LAYERS // 2 - 1, LAYERS - 4)


def make_target(folder: Path) -> Path:
    """Write the target that they are for, of six layers."""
    return make_tiny_model(folder, num_hidden_layers=LAYERS)


def make_folders(target: Path, folder: Path) -> dict[str, Path]:
    """Write a model of each kind below ``folder``; gives its folder by its source."""
    torch.manual_seed(1)
    heads = {"eagle": made.eagle(), "eagle3": made.eagle3(), "fspad": made.fspad()}
    written = {name: each.write(folder / name) for name, each in heads.items()}
    written["streaming"] = make_streams(target, folder / "streaming")
    written["medusa"] = make_medusa(target, folder / "medusa")
    written["peagle"] = made.peagle().write(folder / "peagle")
    written["dflash"] = make_blocks(target, folder / "dflash")
    written["uno"] = make_uno(target, folder / "uno")
    return {**written, "draft_model": make_tiny_model(folder / "draft_model", num_hidden_layers=1)}


def count(folder: Path, file: str = "model.safetensors") -> int:
    return sum(tensor.numel() for tensor in load_file(folder / file).values())


def settings_of(target: Path, *folders: Path, more: tuple[str, ...] = ()) -> Settings:
    named = f"drafter.models=[{', '.join(map(str, folders))}]"
    cache = f"cache_dir={target.parent / 'cache'}"
    return load(flags=[f"model={target}", "server.port=0", cache, named, *more], environ={})


def found(target: Path, *folders: Path) -> dict[str, Checkpoint]:
    settings = settings_of(target, *folders)
    return dict(draft_models.draft_models(settings, ResolvedModel(name="tiny", path=target)))
