"""HQQ: (code - zero point) x scale, with a zero point and a scale in floats for each group, as ``hqq`` stores them.

The weight's numbers in order make another matrix than its own: its rows are the groups (``axis`` 1), or its columns
(``axis`` 0). What a layer's tensors mean is stored beside them, in tensors of one number or of letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.as_blocks import as_blocks, likely_kind
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.packed import Packed, Stored, expect, parts_of
from services.model_files.weights.stored_blocks import Weight

_CODES = ".W_q"
# Beside codes, scales and zero points: what is read before a weight is, and what is known without being read.
_READ = ("shape", "group_size", "axis", "packing", "view_as_float")
_KNOWN = (
    "nbits", "unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_SCALES = ("F16", "BF16", "F32")
_WHOLE = {"U8": "uint8", "I32": "int32", "I64": "int64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packing:
    """How codes are packed: the first of ``each`` equal parts of the rows lies in the highest bits of a word."""

    bits: int
    each: int
    dtype: str = "U8"


_PACKINGS = {
    "8bit_u8": _Packing(bits=8, each=1), "4bit_u8": _Packing(bits=4, each=2),
    "3bit_32": _Packing(bits=3, each=10, dtype="I32"), "2bit_u8": _Packing(bits=2, each=4),
    "1bit_u8": _Packing(bits=1, each=8),
}  # fmt: skip


class Hqq:
    """The method ``hqq``.

    Raises:
        ConfigurationError: a field has a value that is not served.
    """

    entering = ""

    def __init__(self, fields: QuantisationFields) -> None:
        fields.names("skip_modules")

    @property
    def name(self) -> str:
        """What users call it."""
        return "HQQ"

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The weights that have codes."""
        return [_weight(tensors, name.removesuffix(_CODES)) for name in tensors if name.endswith(_CODES)]


def _weight(tensors: Mapping[str, Tensor], layer: str) -> Packed:
    codes = f"{layer}{_CODES}"
    named = {"codes": codes, "scales": f"{layer}.scale", "zeros": f"{layer}.zero"}
    named |= {part: f"{layer}.{part}" for part in _READ}
    parts = parts_of(tensors, named, {part: f"{layer}.{part}" for part in _KNOWN})
    shape, size, axis = _shape(tensors, parts), _number(tensors, parts["group_size"]), _number(tensors, parts["axis"])
    letters = tensors[parts["packing"]].content().decode("ascii", "replace")
    for name, found, allowed in (
        (parts["packing"], letters, tuple(_PACKINGS)),
        (parts["axis"], axis, (0, 1)),
        (parts["view_as_float"], _number(tensors, parts["view_as_float"]), (0,)),
    ):
        if found not in allowed:
            raise ValueError(f"{name} is {str(found)[:40]}: must be {' or '.join(str(one) for one in allowed)}")
    numbers = shape[0] * shape[1]
    if size < 1 or numbers % size:
        raise ValueError(f"{codes} has {numbers} numbers, which are no groups of {size} (group_size)")
    packing, grid = _PACKINGS[letters], (numbers // size, size) if axis else (size, numbers // size)
    why = f"as {parts['shape']} says {list(shape)} in groups of {size} along the axis {axis}"
    expect(tensors, codes, (packing.dtype,), [(-(-grid[0] // packing.each), grid[1])], why)
    for part in ("scales", "zeros"):
        expect(tensors, parts[part], _SCALES, [(grid[0], 1) if axis else (1, grid[1])], why)
    in_rows = size if axis and shape[1] % size == 0 else 0
    expand = partial(_expand, packing=packing, rows=grid[0], shape=shape, size=in_rows)
    kind = likely_kind(packing.bits, False, in_rows, tensors[parts["scales"]].dtype) if in_rows else "F32"
    return Packed(name=f"{layer}.weight", shape=shape, parts=parts, expand=expand, dtype=kind)


def _shape(tensors: Mapping[str, Tensor], parts: Mapping[str, str]) -> tuple[int, int]:
    expect(tensors, parts["shape"], ("I64",), [(2,)])
    outputs, inputs = _numbers(tensors[parts["shape"]])
    if outputs < 1 or inputs < 1:
        raise ValueError(f"{parts['shape']} says {[outputs, inputs]}: must be the sizes of a matrix")
    return outputs, inputs


def _number(tensors: Mapping[str, Tensor], name: str) -> int:
    expect(tensors, name, _WHOLE, [(), (1,)])
    return _numbers(tensors[name])[0]


def _numbers(tensor: Tensor) -> list[int]:
    made: list[int] = torch.frombuffer(bytearray(tensor.content()), dtype=getattr(torch, _WHOLE[tensor.dtype])).tolist()
    return made


def _expand(stored: Stored, packing: _Packing, rows: int, shape: tuple[int, int], size: int) -> Weight:
    """In blocks that hold these numbers, else in float32.

    Args:
        size: inputs in a group; 0: groups are no neighbouring inputs of one output.
    """
    words, most = stored["codes"], (1 << packing.bits) - 1
    codes = torch.cat([(words >> (packing.bits * place)) & most for place in reversed(range(packing.each))])[:rows]
    zeros, scales = stored["zeros"], stored["scales"]
    if size:
        groups = (shape[0], shape[1] // size)
        made = as_blocks(codes.view(shape), zeros.float().view(groups), scales.view(groups), size)
        if made is not None:
            return made
    return codes.float().sub_(zeros.float()).mul_(scales.float()).view(shape)
