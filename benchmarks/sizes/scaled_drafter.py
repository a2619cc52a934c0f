"""A drafter's checkpoint at another hidden size: same layout, shapes that follow the target's, random weights, stored alike.

Heads read the target's states and multiply by its output rows, so that they grow with it. A draft model of its own does not.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.inflate import Size
from benchmarks.sizes.stack import LAYERS
from services.drafter.heads.files.kinds import Checkpoint
from services.drafter.heads.streams.config import KIND
from services.model_files.weights.files import WeightFiles, save_blocks
from services.model_files.weights.headers import read_shapes
from services.model_files.weights.stacked_blocks import StackedBlocks
from services.model_files.weights.stored_blocks import BLOCK, StoredBlocks, Weight, quantized
from speculation.errors import ConfigurationError

_SPREAD = 0.02
# A tensor may read several states, or a state and an embedding, side by side.
_MOST_BESIDE = 6
# A sequential head's embedding of the token before.
_SEQUENTIAL = "markov_w1.weight"
_LAYER = re.compile(r"^layers\.(\d+)\.")


def grows(checkpoint: Checkpoint) -> bool:
    """Whether a drafter's shapes follow the target's."""
    return checkpoint.source != "draft_model"


def scaled_dimensions(old: Size, new: Size, vocabularies: Collection[int] = (), rank: int = 0) -> dict[int, int]:
    """What each dimension becomes that follows from the target's: its width, several beside each other, MLP, heads.

    Args:
        vocabularies: sizes that stay.
        rank: of a block drafter's sequential head, whose rows its confidence reads beside the width; 0: it has none.

    Raises:
        ConfigurationError: two that grow differently are the same number.
    """
    pairs = [
        *((old.width * count, new.width * count) for count in range(1, _MOST_BESIDE + 1)),
        (old.intermediate, new.intermediate),
        (old.heads * old.head_size, new.heads * new.head_size),
        (old.kv_heads * old.head_size, new.kv_heads * new.head_size),
        (old.width + rank, new.width + rank),
    ]
    found: dict[int, int] = {}
    for before, after in pairs:
        if before not in vocabularies and found.setdefault(before, after) != after:
            raise ConfigurationError(
                field="--model",
                value=f"of width {old.width} and MLP {old.intermediate}",
                allowed="one whose width, MLP and heads are told apart by their sizes",
            )
    return found


def write_scaled(checkpoint: Checkpoint, old: Size, new: Size, target_layers: int, folder: Path) -> Path:
    """Write a checkpoint for a target of the shape ``new``, cut to ``LAYERS`` layers.

    Args:
        old: shape of the target that it was made for; ``target_layers``: its number of layers.

    Raises:
        ConfigurationError: its weights cannot be read, or as ``scaled_dimensions``.
    """
    config: dict[str, Any] = json.loads((checkpoint.folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(2)
    shapes = read_shapes(checkpoint.folder)
    rank = next((shape[-1] for name, shape in shapes.items() if name.endswith(_SEQUENTIAL)), 0)
    vocabularies = {config[name] for name in ("vocab_size", "draft_vocab_size") if isinstance(config.get(name), int)}
    dimensions = scaled_dimensions(old, new, vocabularies, rank)
    # Streams are counted as the target's layers are, whose last ones they run through.
    moved = LAYERS - target_layers if config.get("model_type") == KIND else 0
    tensors: dict[str, Weight] = {}
    with WeightFiles(checkpoint.folder) as files:
        for name in sorted(files.names):
            found = files.get(name)
            weight = found.numbers() if isinstance(found, StackedBlocks) else found
            if not isinstance(weight, StoredBlocks) and not weight.is_floating_point():
                # Its vocabulary.
                tensors[name] = weight
                continue
            shape = tuple(dimensions.get(size, size) for size in weight.shape)
            drawn = _drawn(shape, name, generator)
            in_blocks = isinstance(weight, StoredBlocks) and shape[-1] % BLOCK == 0
            renamed = _LAYER.sub(lambda found: f"layers.{int(found[1]) + moved}.", name)
            tensors[renamed] = quantized(drawn) if in_blocks else drawn
    folder.mkdir(parents=True)
    save_blocks(tensors, folder)
    (folder / "config.json").write_text(json.dumps(_scaled_config(config, new, target_layers), indent=1))
    if (checkpoint.folder / "training.json").is_file():
        shutil.copyfile(checkpoint.folder / "training.json", folder / "training.json")
    return folder


def _drawn(shape: tuple[int, ...], name: str, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1 and "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * _SPREAD).bfloat16()


def _scaled_config(config: Mapping[str, Any], new: Size, target_layers: int) -> dict[str, Any]:
    """config.json's fields that follow from the target."""
    known = {
        "hidden_size": new.width,
        "target_hidden_size": new.width,
        "intermediate_size": new.intermediate,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "head_dim": new.head_size,
        "num_target_layers": LAYERS,
    }
    changed: dict[str, Any] = {name: value for name, value in known.items() if name in config}
    if config.get("model_type") == KIND:
        changed["num_hidden_layers"] = LAYERS
    if isinstance(read := config.get("target_layer_ids"), list):
        changed["target_layer_ids"] = spread_layers(read, target_layers)
    return {**config, **changed}


def spread_layers(read: list[int], target_layers: int) -> list[int]:
    """The layers whose states are read, among ``LAYERS``.

    >>> spread_layers([1, 14, 26], 30)
    [0, 3, 5]
    """
    return [round(layer * (LAYERS - 1) / max(1, target_layers - 1)) for layer in read]
