"""bitsandbytes: LLM.int8's rows of bytes, and tables of sixteen values (nf4, fp4) with a scale for each block of numbers.

A weight of four bits lies in its file as one column of bytes; a JSON object beside it (``quant_state``) says its shape.
Scales may be codes themselves, of a table of 256 values (``bnb_4bit_use_double_quant``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.as_blocks import codes_as_blocks
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.packed import Packed, Stored, expect, parts_of
from services.model_files.weights.stored_blocks import BLOCK, TABLES, Weight

_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# bitsandbytes multiplies by this, in float32, where others divide by 127.
_PER_STEP = 7.874015718698502e-3


class BitsAndBytes:
    """The method ``bitsandbytes``.

    Raises:
        ConfigurationError: a field has a value that is not served.
    """

    entering = ""

    def __init__(self, fields: QuantisationFields) -> None:
        four: bool = fields.one_of("load_in_4bit", (False, True), False)
        self._kind = fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4") if four else "int8"
        fields.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")

    @property
    def name(self) -> str:
        """What users call it."""
        return f"bitsandbytes, {self._kind}"

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The weights in bytes and those in tables of sixteen values."""
        bytes_ = [name for name, tensor in tensors.items() if tensor.dtype == "I8" and name.endswith(".weight")]
        states = [name for name in tensors if name.endswith(_STATES)]
        return [_int8(tensors, name.removesuffix(".weight")) for name in bytes_] + [
            _four_bits(tensors, name) for name in states
        ]


def _int8(tensors: Mapping[str, Tensor], layer: str) -> Packed:
    codes = f"{layer}.weight"
    layout = {"layout": f"{layer}.weight_format"}
    parts = parts_of(tensors, {"codes": codes, "scales": f"{layer}.SCB"}, layout)
    shape = tensors[codes].shape
    expect(tensors, parts["scales"], ("F32",), [shape[:1]], f"as {codes} is {tensors[codes]}")
    return Packed(name=codes, shape=shape, parts=parts, expand=partial(_rows, layer=layer))


def _rows(stored: Stored, layer: str) -> torch.Tensor:
    layout = stored.get("layout")
    if layout is not None and layout.numel() and int(layout.view(-1)[0]):
        raise ValueError(f"{layer}.weight_format is {int(layout.view(-1)[0])}: must be 0, rows of bytes in their order")
    return stored["codes"] * stored["scales"].view(-1, 1) * _PER_STEP


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What ``quant_state`` says of a weight.

    Attributes:
        block: numbers that share a scale.
        scales_block: scales that share a scale of their own; None: scales are stored as numbers.
        offset: what is added to scales that are codes.
    """

    shape: tuple[int, ...]
    block: int
    scales_block: int | None
    offset: float


def _four_bits(tensors: Mapping[str, Tensor], state_name: str) -> Packed:
    codes = state_name[: -len(_STATES[0])]
    state = _read(tensors[state_name], state_name)
    named = {"codes": codes, "scales": f"{codes}.absmax", "table": f"{codes}.quant_map", "state": state_name}
    if state.scales_block is not None:
        named |= {"scales_scales": f"{codes}.nested_absmax", "scales_table": f"{codes}.nested_quant_map"}
    parts, why = parts_of(tensors, named), f"as {state_name} says {list(state.shape)} in blocks of {state.block}"
    numbers = Tensor(dtype="F32", shape=state.shape).numbers
    blocks = -(-numbers // state.block)
    half = -(-numbers // 2)
    expect(tensors, codes, ("U8",), [(half, 1), (1, half)], why)
    expect(tensors, parts["scales"], ("F32",) if state.scales_block is None else ("U8",), [(blocks,)], why)
    expect(tensors, parts["table"], ("F32",), [(16,)])
    if state.scales_block is not None:
        expect(tensors, parts["scales_scales"], ("F32",), [(-(-blocks // state.scales_block),)], why)
        expect(tensors, parts["scales_table"], ("F32",), [(256,)])
    kind = state_name[-len("nf4") :].upper()
    expand = partial(_from_table, state=state, kind=kind)
    return Packed(name=codes, shape=state.shape, parts=parts, expand=expand, dtype=kind if _in_blocks(state) else "F32")


def _read(tensor: Tensor, name: str) -> _State:
    try:
        given: dict[str, Any] = json.loads(tensor.content())
        nested = given.get("nested_blocksize")
        made = _State(
            shape=tuple(given["shape"]),
            block=given["blocksize"],
            scales_block=nested,
            offset=float(given["nested_offset"]) if nested is not None else 0.0,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{name} is no JSON object with shape and blocksize; fetch the files again") from error
    sizes = [*made.shape, made.block, *([] if made.scales_block is None else [made.scales_block])]
    if any(type(size) is not int or size < 1 for size in sizes) or made.block not in _BLOCKS:
        raise ValueError(f"{name} says shape {list(made.shape)}, blocksize {made.block} and nested_blocksize {nested}")
    return made


def _in_blocks(state: _State) -> bool:
    """Whether rows are whole blocks: each of these has one scale, since its numbers lie side by side."""
    return len(state.shape) == 2 and state.shape[1] % BLOCK == 0


def _from_table(stored: Stored, state: _State, kind: str) -> Weight:
    scales = stored["scales"]
    if state.scales_block is not None:
        shared = stored["scales_scales"].repeat_interleave(state.scales_block)[: len(scales)]
        scales = stored["scales_table"][scales.long()] * shared + state.offset
    packed = stored["codes"].view(-1)
    # The first of two numbers lies in the upper half of their byte.
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten()
    numbers = Tensor(dtype="F32", shape=state.shape).numbers
    if _in_blocks(state) and torch.equal(stored["table"], torch.tensor(TABLES[kind], dtype=torch.float32)):
        own = scales.repeat_interleave(state.block // BLOCK)[: numbers // BLOCK].view(state.shape[0], -1)
        return codes_as_blocks(kind, codes.view(state.shape), own)
    made = stored["table"][codes[:numbers].long()] * scales.repeat_interleave(state.block)[:numbers]
    return made.view(state.shape)
