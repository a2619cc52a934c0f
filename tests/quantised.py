"""Quantised checkpoints, made of the tiny model's weights, each with the numbers that its format's own package makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.tiny import make_tiny_model

# Ends of the names of what is quantised, w1 to w3 being those of a mixture's experts.
QUANTISED = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
Weights = dict[str, torch.Tensor]
# Stored tensors by what follows the layer's name, and the numbers that they stand for.
Made = tuple[Weights, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """A way to store linear layers.

    Attributes:
        config: its ``quantization_config``.
        make: quantises a matrix in float32, [outputs, inputs].
    """

    config: Mapping[str, Any]
    make: Callable[[torch.Tensor], Made]


def make_float_model(folder: Path, **overrides: object) -> Path:
    """A tiny model whose matrices are no multiples of 128, but of 32."""
    return make_tiny_model(folder, **{"hidden_size": 192, "intermediate_size": 160, **overrides})


def quantise(model: Path, folder: Path, how: Quantised) -> tuple[Path, Path]:
    """Store ``model`` quantised, and beside it the float model that this stands for; returns both folders."""
    weights = load_file(model / "model.safetensors")
    stored: Weights = {}
    plain: Weights = {}
    for name, weight in weights.items():
        if not name.endswith(QUANTISED):
            stored[name] = plain[name] = weight
            continue
        made, plain[name] = how.make(weight)
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in made.items()}
    for kind, tensors in (("quantised", stored), ("plain", plain)):
        shutil.copytree(model, folder / kind)
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
    configure(folder / "quantised", quantization_config=dict(how.config))
    return folder / "quantised", folder / "plain"


def configure(folder: Path, **fields: object) -> None:
    """Change fields of ``config.json``."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fields))


def fp8_blocks(weight: torch.Tensor, size: int, scales: torch.dtype = torch.float32) -> Made:
    """As DeepSeek's ``weight_dequant`` reads it."""
    rows, columns = weight.shape
    codes, scale = torch.empty_like(weight), torch.empty(-(-rows // size), -(-columns // size))
    numbers = torch.empty_like(weight)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            at = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
            scale[row, column] = (weight[at].abs().max() / 448).to(scales)
            codes[at] = (weight[at] / scale[row, column]).to(torch.float8_e4m3fn).float()
            numbers[at] = codes[at] * scale[row, column]
    made = {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scale.to(scales)}
    if rows % size == 0 and columns % size == 0:
        theirs = Fp8Dequantize(None)._dequantize_one(made["weight"], made["weight_scale_inv"], torch.float32)
        assert torch.equal(theirs, numbers)
    return made, numbers


def fp8_rows(weight: torch.Tensor, scales: torch.dtype = torch.bfloat16) -> Made:
    """A scale for each output."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(scales)
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_whole(weight: torch.Tensor) -> Made:
    """A scale for the whole weight."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


FORMS: Mapping[str, Quantised] = {
    "fp8_blocks_of_128": Quantised(
        config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        make=lambda weight: fp8_blocks(weight, 128),
    ),
    "fp8_blocks_of_32": Quantised(
        config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
        make=lambda weight: fp8_blocks(weight, 32, torch.bfloat16),
    ),
    "fp8_rows": Quantised(config={"quant_method": "fp8"}, make=fp8_rows),
    "fp8_whole": Quantised(config={"quant_method": "fp8", "activation_scheme": "dynamic"}, make=fp8_whole),
}
