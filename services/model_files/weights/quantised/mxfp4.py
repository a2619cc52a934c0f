"""MXFP4 as gpt-oss stores its experts: blocks of 32 numbers of four bits with a power of two as their scale."""

from __future__ import annotations

from collections.abc import Mapping

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.four_bit_floats import MX_BLOCK, mx_weight
from services.model_files.weights.quantised.packed import Packed, Stored, expect, parts_of
from services.model_files.weights.stacked_blocks import AnyWeight, in_a_stack

_CODES = "_blocks"


class Mxfp4:
    """The method ``mxfp4``."""

    entering = ""

    name = "MXFP4"

    def __init__(self, fields: QuantisationFields) -> None:
        # Which layers are quantised is read from the tensors.
        fields.names("modules_to_not_convert")

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The experts' weights."""
        return [_weight(tensors, name.removesuffix(_CODES)) for name in tensors if name.endswith(_CODES)]


def _weight(tensors: Mapping[str, Tensor], name: str) -> Packed:
    parts = parts_of(tensors, {"codes": f"{name}{_CODES}", "scales": f"{name}_scales"})
    codes = tensors[parts["codes"]]
    if len(codes.shape) != 4:
        raise ValueError(f"{parts['codes']} is {codes}: must be [experts, outputs, blocks, {MX_BLOCK // 2}]")
    experts, outputs, blocks, _ = codes.shape
    expect(tensors, parts["codes"], ("U8",), [(experts, outputs, blocks, MX_BLOCK // 2)])
    expect(tensors, parts["scales"], ("U8",), [(experts, outputs, blocks)], f"as {parts['codes']} is {codes}")
    return Packed(name=name, shape=(experts, blocks * MX_BLOCK, outputs), parts=parts, expand=_expand, dtype="MXFP4")


def _expand(stored: Stored) -> AnyWeight:
    # Stored by outputs, though the model has inputs first: blocks are of inputs.
    each = zip(stored["codes"], stored["scales"], strict=True)
    return in_a_stack([mx_weight(codes.flatten(-2), scales) for codes, scales in each], inputs_first=True)
