"""Folders of weights that take the place of a served model's, and damaged ones that do not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"


def write(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(weights), folder / FILE, metadata={"format": "pt"})


def other_weights(model: Path, folder: Path, seed: int = 1) -> Path:
    """A model of the same form with other matrices, written to ``folder``."""
    shutil.copytree(model, folder)
    drawn = torch.Generator().manual_seed(seed)
    weights = {
        name: weight + 0.3 * weight.std() * torch.randn(weight.shape, generator=drawn) if weight.dim() > 1 else weight
        for name, weight in load_file(folder / FILE).items()
    }
    write(folder, weights)
    return folder


_UP = "model.layers.0.mlp.up_proj.weight"


def _changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / FILE)
        change(weights)
        write(folder, weights)

    return damage


def _in_json(name: str, **fields: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return damage


def _cut_off(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[: len(data) // 2])


def _another_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _leads_out(folder: Path) -> None:
    outside = folder.parent.parent / "outside.safetensors"
    os.replace(folder / FILE, outside)
    (folder / FILE).symlink_to(outside)


# What may be wrong with a folder of new weights, by name.
DAMAGES: dict[str, Callable[[Path], None]] = {
    "another shape": _changed(lambda weights: weights.update({_UP: weights[_UP][:-1].contiguous()})),
    "a weight is missing": _changed(lambda weights: weights.pop(_UP)),
    "a weight too many": _changed(lambda weights: weights.update({"model.layers.0.mlp.bias": torch.zeros(3)})),
    "not a number": _changed(lambda weights: weights[_UP][3, 5].fill_(float("nan"))),
    "infinite": _changed(lambda weights: weights[_UP][3, 5].fill_(float("inf"))),
    "cut off": _cut_off,
    "half of it has arrived": lambda folder: (folder / FILE).unlink(),
    "another configuration": _in_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "another flag": _in_json("config.json", return_dict=False),
    "other ends of text": _in_json("generation_config.json", eos_token_id=7),
    "another tokenizer": _another_tokenizer,
    "a file that lies elsewhere": _leads_out,
}
