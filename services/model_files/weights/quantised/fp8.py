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
from services.model_files.weights.quantised.packed import Packed, Stored, expect, groups_of, parts_of, spread
from services.model_files.weights.rounded_inputs import InputRounding
from services.model_files.weights.stacked_blocks import AnyWeight, in_a_stack
from services.model_files.weights.stored_blocks import BLOCK, FLOATS, Weight

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
    """A weight of codes and scales: a matrix, or those of all experts.

    Args:
        block: outputs and inputs that share a scale, unless there is one for each output or for the whole weight.

    Raises:
        ValueError: the scales are missing or do not fit.
    """
    parts, shape = parts_of(tensors, {"codes": codes, "scales": scales}), tensors[codes].shape
    if len(shape) < 2:
        raise ValueError(f"{codes} is {tensors[codes]}: must be a matrix")
    stacked = len(shape) == 3 and not codes.endswith(".weight")
    inputs_first = stacked and _inputs_first(tensors, codes)
    block = _shared(tensors, codes, scales, block, inputs_first)
    inputs, shared = (shape[-2], block[0]) if inputs_first else (shape[-1], block[1])
    kept = tensors[codes].dtype == "F8_E4M3" and (stacked or len(shape) == 2) and takes_groups(shared, inputs)
    expand = partial(_experts, block=block, inputs_first=inputs_first) if stacked else partial(_expand, block=block)
    return Packed(name=codes, shape=shape, parts=parts, expand=expand, dtype=FLOATS if kept else "F32")


def powers_scaled(tensors: Mapping[str, Tensor], codes: str, scales: str, size: int | None) -> Packed:
    """A matrix in MXFP8: a power of two for each ``size`` inputs, stored as a byte.

    Raises:
        ValueError: the scales are missing or do not fit.
    """
    parts, shape = parts_of(tensors, {"codes": codes, "scales": scales}), tensors[codes].shape
    if size != BLOCK or len(shape) != 2:
        raise ValueError(f"{codes} is {tensors[codes]} in groups of {size}: must be a matrix in groups of {BLOCK}")
    why = f"as {codes} is {tensors[codes]} in groups of {size}"
    expect(tensors, codes, ("F8_E4M3",), [shape])
    expect(tensors, scales, ("U8",), [(shape[0], groups_of(shape[1], size, codes))], why)
    return Packed(name=codes, shape=shape, parts=parts, expand=_by_powers, dtype=FLOATS)


def _by_powers(stored: Stored) -> Weight:
    exponents = stored["scales"].int() - 127
    return _matrix(stored["codes"], torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents), (1, BLOCK))


def _inputs_first(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Whether experts' matrices have inputs first, as Llama 4's and gpt-oss's do: of gates and ups, the longer side is last.

    Nothing depends on it but how they are kept.
    """
    layer, _, _ = name.rpartition(".")
    first, second = tensors.get(f"{layer}.gate_up_proj"), tensors.get(f"{layer}.down_proj")
    if first is None or second is None or len(first.shape) != 3 or len(second.shape) != 3:
        return False
    return first.shape[1:] == (second.shape[2], 2 * second.shape[1])


def _shared(
    tensors: Mapping[str, Tensor], codes: str, scales: str, block: tuple[int, int] | None, inputs_first: bool
) -> tuple[int, int]:
    """Rows and columns that share a scale, by the shape of the scales."""
    *leading, rows, columns = tensors[codes].shape
    found = tensors[scales].shape
    whole = ((), (1,), (1, 1), (*leading, 1, 1))
    each = ((*leading, rows), (*leading, rows, 1))
    # transformers has one for an expert's gates and one for its ups, where others have one for both.
    halves = ((*leading, 2, 1),) if leading and rows % 2 == 0 else ()
    outputs = ((*leading, 1, columns),) if inputs_first else ()
    grid = () if block is None else ((*leading, -(-rows // block[0]), -(-columns // block[1])),)
    expect(tensors, scales, _SCALES, (*grid, *whole, *each, *halves, *outputs), f"as {codes} is {tensors[codes]}")
    if block is not None and found in grid:
        return block
    if found in whole:
        return rows, columns
    if found in outputs:
        return rows, 1
    return (rows // 2, columns) if found in halves else (1, columns)


def _expand(stored: Stored, block: tuple[int, int]) -> Weight:
    codes, scales = stored["codes"], _grid(stored["scales"], stored["codes"].shape)
    if codes.dim() == 2:
        return _matrix(codes, scales, block)
    return codes.float().mul_(spread(scales, tuple(codes.shape), block))


def _experts(stored: Stored, block: tuple[int, int], inputs_first: bool) -> AnyWeight:
    codes = stored["codes"]
    each = zip(codes, _grid(stored["scales"], codes.shape), strict=True)
    if not inputs_first:
        return in_a_stack([_matrix(own, scales, block) for own, scales in each])
    # Blocks are of inputs.
    turned = (block[1], block[0])
    return in_a_stack([_matrix(own.T.contiguous(), scales.T, turned) for own, scales in each], inputs_first=True)


def _matrix(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> Weight:
    """[outputs, inputs], of scales [rows of blocks, columns of blocks]: in blocks that hold the numbers, or in float32."""
    of_outputs = scales.float().repeat_interleave(block[0], 0)[: len(codes)]
    if (blocks := floats_as_blocks(codes, of_outputs, block[1])) is not None:
        return blocks
    return codes.float().mul_(spread(scales, tuple(codes.shape), block))


def _grid(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[..., rows of blocks, columns of blocks], where there may be one for the whole weight, or one for each row."""
    if scales.numel() == 1:
        return scales.view(1, 1).expand(*shape[:-2], 1, 1)
    return scales if scales.dim() == len(shape) else scales[..., None]
