"""Checkpoints of Medusa's heads, in their authors' layout or vLLM's (``authors_names``), as safetensors.

Without output layers of their own the target's is shared, and ``d2t`` and ``t2d`` may cut it to a draft vocabulary, as in
EAGLE-3. What counts is the tensors: published ``config.json`` say two heads where there are five.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.drafter.heads.files.head_files import CONFIG
from services.drafter.heads.files.level_files import Tensors, check_numbers, read_tensors, take_output, write_checkpoint
from services.drafter.heads.files.target_rows import read_target_rows, read_target_shape
from services.drafter.heads.medusa.config import (
    authors_names,
    is_medusa,
    is_output,
    named_by_authors,
    parameter_names,
    parse_medusa,
)
from services.drafter.heads.medusa.heads import MedusaHeads
from services.model_files.folder import read_json
from speculation.errors import ConfigurationError


def load_medusa(
    folder: Path,
    target: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MedusaHeads:
    """The heads in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: as ``parse_medusa``; or a tensor is no finite numbers.
    """
    where, shape = str(folder), read_target_shape(target)
    read = read_tensors(folder, target)
    names = authors_names(read)
    if not is_medusa(names.values()):
        raise ConfigurationError(f"cannot load the head at {where} as medusa: it holds no 0.0.linear.weight", about=where)
    shapes = named_by_authors({name: tuple(tensor.shape) for name, tensor in read.items()})
    config = parse_medusa(read_json(folder / CONFIG, of="head"), shapes, shape, where)
    rows = read_target_rows(target, device=device, dtype=dtype)
    tensors: Tensors = {names[name]: tensor for name, tensor in read.items()}
    output = take_output(tensors, rows, shape, where)
    _cut_outputs(tensors, output.ids, shape.vocab_size)
    check_numbers(tensors, where)
    with torch.device("meta"):
        heads = MedusaHeads(config, output)
    heads.load_state_dict({name: tensors[public] for name, public in parameter_names(config).items()}, assign=True)
    return heads.to(device, dtype).requires_grad_(False).eval()


def _cut_outputs(tensors: Tensors, ids: torch.Tensor, vocab_size: int) -> None:
    """Leave of output layers that score all tokens the rows of the draft vocabulary, [V_d] ``ids``."""
    for name in filter(is_output, tensors):
        if len(tensors[name]) == vocab_size:
            tensors[name] = tensors[name][ids.cpu()]


def save_medusa(
    heads: MedusaHeads,
    folder: Path,
    training: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    target_name: str = "",
) -> None:
    """Write a checkpoint of which ``load_medusa`` makes the same heads.

    Args:
        training: for training.json: how they were made.
        target_name: name or path of the target.

    Raises:
        OSError: a file cannot be written.
    """
    config = heads.config
    fields = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "base_model_name_or_path": target_name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.num_outputs == 1,
    }
    state, names = heads.state_dict(), parameter_names(config)
    tensors = {public: state[name].detach().to("cpu", dtype).contiguous() for name, public in names.items()}
    write_checkpoint(folder, tensors, fields, training, heads.output.ids)
