"""What checkpoints of streams and of Medusa's heads have in common: config.json, training.json and one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from services.drafter.heads.draft_vocabulary import SharedOutput, membership, offsets_of_ids
from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.head_files import CONFIG, take_vocabulary
from services.drafter.heads.files.layouts import DRAFT_OFFSETS, DRAFTED
from services.drafter.heads.files.pickled import refuse_pickles
from services.drafter.heads.files.target_rows import TargetRows
from services.drafter.heads.files.target_shape import TRAINING, check_tokenizer
from services.model_files.folder import reading
from services.model_files.weights.files import WeightFiles, is_whole_float
from services.model_files.weights.headers import SINGLE
from speculation.errors import ConfigurationError
from speculation.files import write_whole

Tensors = dict[str, torch.Tensor]


def read_tensors(folder: Path, target: Path) -> Tensors:
    """All tensors of a checkpoint, by name.

    Raises:
        ConfigurationError: they are pickled or damaged, or were made for a target with another tokenizer.
    """
    refuse_pickles(folder)
    check_tokenizer(folder, target)
    with reading(f"load the head at {folder}", about=folder), WeightFiles(folder) as files:
        found = {name: files.get(name) for name in files.names}
        return {name: each.clone() if isinstance(each, torch.Tensor) else each.float() for name, each in found.items()}


def take_output(tensors: Tensors, rows: TargetRows, target: TargetShape, where: str) -> SharedOutput:
    """The target's output layer, cut to the checkpoint's draft vocabulary, which is taken out of ``tensors``.

    Raises:
        ConfigurationError: the draft vocabulary is not the target's.
    """
    ids = take_vocabulary(tensors, target, where)
    return SharedOutput(rows, torch.arange(target.vocab_size) if ids is None else ids)


def check_numbers(tensors: Tensors, where: str) -> None:
    """Check that all are floating-point numbers, and finite.

    Raises:
        ConfigurationError: names one that is not.
    """
    for name, tensor in tensors.items():
        if not is_whole_float(tensor) or not bool(torch.isfinite(tensor).all()):
            raise ConfigurationError(
                place=f"cannot load the head at {where}",
                field=f"the tensor {name}",
                value=tensor.dtype,
                given="or holds infinite values or NaN",
                allowed="finite floating-point numbers",
            )


def write_checkpoint(
    folder: Path, tensors: Tensors, config: Mapping[str, Any], training: Mapping[str, Any], ids: torch.Tensor
) -> None:
    """Write model.safetensors, config.json and training.json.

    Args:
        config: with the target's ``vocab_size``.
        ids: [V_d] int64, the draft vocabulary; left out if it is the whole vocabulary.

    Raises:
        OSError: a file cannot be written.
    """
    size = int(config["vocab_size"])
    if len(ids) < size:
        tensors = {**tensors, DRAFT_OFFSETS: offsets_of_ids(ids.cpu()), DRAFTED: membership(ids, size)}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SINGLE, save(tensors, metadata={"format": "pt"}))
    write_whole(folder / TRAINING, json.dumps(dict(training), indent=2).encode())
    write_whole(folder / CONFIG, json.dumps(dict(config), indent=2).encode())
