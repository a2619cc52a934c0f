"""Weights in FP8 with scales: one for a weight, one for each output, or one for each block of outputs and inputs.

Method ``fp8``, as DeepSeek, Qwen and transformers (``FineGrainedFP8Config``) store it. A number is its code times its scale,
multiplied in float32. Those that multiply in FP8 also round what enters a layer. The model that the weights stand for does
not, with ``activation_scheme: dynamic``; with ``static`` a scale is stored for what enters each layer, and that is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.as_blocks import floats_as_blocks, takes_groups
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.packed import Packed, Stored, expect, parts_of, spread
from services.model_files.weights.rounded_inputs import InputRounding
from services.model_files.weights.stored_blocks import FLOATS, Weight

CODES = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


class Fp8:
    """The method ``fp8``.

    Raises:
        ConfigurationError: a field has a value that is not served.
    """

    def __init__(self, fields: QuantisationFields) -> None:
        static = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self._entering = InputRounding(floats=True, stored=True) if static else None
        fields.one_of("fmt", ("e4m3",) if static else ("e4m3", "e5m2"), "e4m3")
        self._block = _block(fields)

    @property
    def name(self) -> str:
        """What users call it."""
        return "FP8" if self._block is None else f"FP8 in blocks of {self._block[0]} x {self._block[1]}"

    @property
    def entering(self) -> str:
        """How layers round what enters them; empty: none does."""
        return "" if self._entering is None else self._entering.name

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The weights in FP8."""
        return [self._weight(tensors, name) for name, tensor in tensors.items() if tensor.dtype in CODES]

    def _weight(self, tensors: Mapping[str, Tensor], name: str) -> Packed:
        scales = f"{name}_scale" if f"{name}_scale" in tensors else f"{name}_scale_inv"
        made = scaled(tensors, name, scales, self._block)
        if self._entering is None:
            return made
        parts = {**made.parts, "input_scale": _entering_scale(tensors, name)}
        return replace(made, parts=parts, entering=self._entering)


def _entering_scale(tensors: Mapping[str, Tensor], codes: str) -> str:
    """The name of the scale of what enters a layer: transformers', or AutoFP8's."""
    layer = codes.removesuffix(".weight")
    name = next((one for one in (f"{layer}.activation_scale", f"{layer}.input_scale") if one in tensors), None)
    if name is None:
        raise ValueError(f"its files hold no {layer}.activation_scale, by which what enters {layer} is rounded")
    expect(tensors, name, ("F32", "BF16", "F16"), [(), (1,)], "one for all that enters the layer")
    return name


def _block(fields: QuantisationFields) -> tuple[int, int] | None:
    given = fields.get("weight_block_size")
    if given is None:
        return None
    if not isinstance(given, list | tuple) or len(given) != 2 or any(type(size) is not int or size < 1 for size in given):
        raise fields.refusal("weight_block_size", "two whole numbers from 1 on, or null")
    return given[0], given[1]


def scaled(tensors: Mapping[str, Tensor], codes: str, scales: str, block: tuple[int, int] | None) -> Packed:
    """A weight of codes and scales.

    Args:
        block: outputs and inputs that share a scale, unless there is one for each output or for the whole weight.

    Raises:
        ValueError: the scales are missing or do not fit.
    """
    parts, shape = parts_of(tensors, {"codes": codes, "scales": scales}), tensors[codes].shape
    if len(shape) < 2:
        raise ValueError(f"{codes} is {tensors[codes]}: must be a matrix")
    rows, columns = shape[-2:]
    found = tensors[scales].shape
    whole = ((), (1,), (1, 1), (*shape[:-2], 1, 1))
    each = ((*shape[:-2], rows), (*shape[:-2], rows, 1))
    grid = () if block is None else ((*shape[:-2], -(-rows // block[0]), -(-columns // block[1])),)
    expect(tensors, scales, _SCALES, (*grid, *whole, *each), f"as {codes} is {tensors[codes]}")
    if block is None or found not in grid:
        block = (rows, columns) if found in whole else (1, columns)
    kept = tensors[codes].dtype == "F8_E4M3" and len(shape) == 2 and takes_groups(block[1], columns)
    expand = partial(_expand, shape=shape, block=block)
    return Packed(name=codes, shape=shape, parts=parts, expand=expand, dtype=FLOATS if kept else "F32")


def _expand(stored: Stored, shape: tuple[int, ...], block: tuple[int, int]) -> Weight:
    codes, scales = stored["codes"], stored["scales"]
    if (
        len(shape) == 2
        and (blocks := floats_as_blocks(codes, _of_outputs(scales, shape[0], block[0]), block[1])) is not None
    ):
        return blocks
    if block == shape[-2:] and scales.numel() == 1:
        return stored["codes"].float().mul_(scales.float().view(()))
    if scales.dim() < len(shape):
        scales = scales[..., None]
    return stored["codes"].float().mul_(spread(scales, shape, block))


def _of_outputs(scales: torch.Tensor, outputs: int, rows: int) -> torch.Tensor:
    """[outputs, groups] in float32, of scales that ``rows`` outputs share."""
    grid = scales.float().reshape(-1, 1) if scales.dim() < 2 else scales.float()
    return grid.repeat_interleave(rows, 0)[:outputs]
