"""Loads a block drafter's checkpoint: config.json and safetensors, of the authors' layout or the speculators library's."""

from __future__ import annotations

from pathlib import Path

import torch

from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.fields import is_block, named, parse_blocks, public_name
from services.drafter.heads.files.head_fields import refused_tensor
from services.drafter.heads.files.head_files import CONFIG, share, take_vocabulary
from services.drafter.heads.files.layouts import DRAFT_OFFSETS
from services.drafter.heads.files.level_files import Tensors, check_numbers, read_tensors
from services.drafter.heads.files.target_rows import read_target_rows, read_target_shape
from services.model_files.folder import read_json
from speculation.errors import ConfigurationError


def load_blocks(
    folder: Path,
    target: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> BlockDrafter:
    """The block drafter in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: as ``parse_blocks``; or a tensor is no finite numbers.
    """
    where, shape = str(folder), read_target_shape(target)
    read = read_tensors(folder, target)
    if not is_block(read):
        raise ConfigurationError(
            f"cannot load the head at {where} as dflash: it holds no fc.weight and hidden_norm.weight", about=where
        )
    config = read_json(folder / CONFIG, of="head")
    shapes = named({name: tuple(tensor.shape) for name, tensor in read.items()})
    # Before anything is changed, so that what is said is about the file.
    parse_blocks(config, shapes, shape, where)
    tensors: Tensors = {}
    for name in sorted(read):
        if (own := public_name(name)) in tensors:
            raise refused_tensor(where, name, f"there twice, as {own}")
        if own in shapes:
            tensors[own] = read[name]
    rows = read_target_rows(target, device=device, dtype=dtype)
    ids = take_vocabulary(tensors, shape, where)
    check_numbers(tensors, where)
    share(tensors, rows, ids)
    left = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    parsed = parse_blocks(config, left if ids is None else {**left, DRAFT_OFFSETS: (len(ids),)}, shape, where)
    if ids is None:
        ids = torch.arange(shape.vocab_size)
    # Not accelerate's ``init_empty_weights``, which would empty what other threads load meanwhile.
    with torch.device("meta"):
        drafter = BlockDrafter(parsed, rows, ids)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(device, dtype).requires_grad_(False).eval()
