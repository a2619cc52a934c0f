"""Blocks of GGUF files that are kept, and weights by the rules that transformers has for some architectures (Qwen3.5)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize, quants
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import get_gguf_conversion_mapping

from services.model_files.weights.quantised.as_blocks import codes_as_blocks
from services.model_files.weights.stacked_blocks import AnyWeight, StackedBlocks
from services.model_files.weights.stored_blocks import KEPT, StoredBlocks

# NVFP4 is read, too: its blocks of 64 inputs, with a scale of a byte for each 16, become ours.
_OURS = "NVFP4"
READ = (*KEPT, _OURS)
# Inputs that share a scale, and how many scales and bytes of codes a block has.
_PART, _SCALES, _CODES = 16, 4, 32


def in_blocks(raw: torch.Tensor, kind: str, inputs: int) -> StoredBlocks:
    """A matrix as a file stores it, [outputs, bytes]; ``kind`` is one of ``READ``."""
    if kind != _OURS:
        return StoredBlocks(raw, kind, inputs)
    blocks = raw.view(len(raw), -1, _SCALES + _CODES)
    bytes_of = blocks[..., _SCALES:].reshape(len(raw), -1, _SCALES, _CODES // _SCALES)
    # Of 16 inputs, the first eight lie in the lower halves of the bytes.
    codes = torch.cat([bytes_of & 15, bytes_of >> 4], -1).reshape(len(raw), inputs)
    # The package's numbers are twice as great, and its scales half as great.
    scales = 2 * quants.NVFP4.ue4m3_to_fp32(blocks[..., :_SCALES].numpy()).astype(np.float32)
    return codes_as_blocks("E2M1", codes, torch.from_numpy(scales).reshape(len(raw), inputs // _PART))


def weights_by_rules(
    reader: GGUFReader, model: PreTrainedModel, architecture: str, say: Callable[[str], None]
) -> dict[str, AnyWeight]:
    """All weights by transformers' names: in blocks, where its rules move no number out of one."""
    rules = get_gguf_conversion_mapping(architecture, model.config)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    # By a weight's name and the pattern of its rule, what of it is in the file.
    parts: dict[str, dict[str, Any]] = {}
    for tensor in reader.tensors:
        name, pattern = rename_source_key(tensor.name, renamings, converters)
        parts.setdefault(name, {})[pattern or ""] = tensor
    found: dict[str, AnyWeight] = {}
    checked: dict[str, bool] = {}
    unpacked: set[str] = set()
    for name, tensors in parts.items():
        rule = by_pattern.get(next(iter(tensors)))
        blocks, alike = _blocks(rule, tensors), re.sub(r"\d+", "N", name)
        if blocks is not None and alike not in checked:
            # The same as of numbers, tested on one layer of each kind.
            checked[alike] = torch.equal(blocks.float(), _numbers(rule, tensors))
        if blocks is not None and checked[alike]:
            found[name] = blocks
            continue
        found[name] = _numbers(rule, tensors)
        unpacked |= {tensor.tensor_type.name for tensor in tensors.values()} - {"F32", "F16", "BF16"}
    if unpacked:
        say(f"some weights of the type {', '.join(sorted(unpacked))} become float32: they cannot be kept as stored")
    return found


def _numbers(rule: WeightConverter | None, tensors: Mapping[str, Any]) -> torch.Tensor:
    whole = {
        pattern: torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        for pattern, tensor in tensors.items()
    }
    return _by(rule, whole).float()


def _blocks(rule: WeightConverter | None, tensors: Mapping[str, Any]) -> StoredBlocks | StackedBlocks | None:
    """What a rule makes of blocks; None: these are of other or of several types, or it does not take blocks."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values()}
    operations = [] if rule is None else rule.operations
    if len(kinds) > 1 or not kinds <= set(READ) or not all(getattr(one, "supports_packed", False) for one in operations):
        return None
    first = next(iter(tensors.values()))
    kind, inputs = first.tensor_type.name, int(first.shape[0])
    raw = _by(rule, {pattern: torch.from_numpy(np.array(tensor.data)) for pattern, tensor in tensors.items()})
    if raw.dim() == 3:
        return StackedBlocks(tuple(in_blocks(one, kind, inputs) for one in raw))
    if raw.dim() != 2:
        return None
    blocks = in_blocks(raw, kind, inputs)
    # Where inputs are to lie in another order, transformers leaves the blocks as they are and moves what meets them.
    orders = [order for one in operations if (order := getattr(one, "input_permutation", None)) is not None]
    return StoredBlocks(blocks.raw, blocks.kind, inputs, orders[0].long()) if orders else blocks


def _by(rule: WeightConverter | None, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    made: dict[str, Any] = {pattern: [tensor] for pattern, tensor in tensors.items()}
    if rule is not None:
        patterns = {"source_patterns": rule.source_patterns, "target_patterns": rule.target_patterns}
        for operation in rule.operations:
            made = operation.convert(made, **patterns)
    (one,) = made.values()
    found: torch.Tensor = one[0] if isinstance(one, list) else one
    return found.contiguous()
