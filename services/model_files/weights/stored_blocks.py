"""Weights in blocks of numbers with a few bits each and scales: as a GGUF file stores them, or with zero points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from typing_extensions import override

# GGUF's types whose blocks the kernels can read. Those of the K types and of IQ4_XS have 256 inputs, others BLOCK.
KEPT = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS",
)  # fmt: skip
# Our own types, by their bits: a scale and a zero point in float16, then codes from 0 on, laid out as Q4_1's and Q8_0's.
WITH_ZEROS = {"Q4_Z": 4, "Q8_Z": 8}
# Likewise, with a scale and a zero point for each half of a block: both scales, then both zero points, then codes.
IN_HALVES = "Q4_H"
# Likewise: a scale in float32, then floats of a byte.
FLOATS = "E4M3"
# Likewise: scales in float32, of each block or (E2M1) of each of its halves, then codes of a table, laid out as Q4_0's.
TABLES = {
    "NF4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "FP4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
    "E2M1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}  # fmt: skip
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# The scale of an MXFP4 block is half of two to the power of its first byte less 127; from the next one on, no float holds
# the greatest number, 12 times the scale.
_GREATEST_POWER = 252
BLOCK = 32
# Bytes of the one or two float16 numbers of a block that all others are made with; of other types the first four.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), slice(0, 2)),
    IN_HALVES: slice(0, 8),
    "MXFP4": slice(0, 0),
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q6_K": slice(208, 210),
}


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in blocks.

    Attributes:
        raw: [outputs, bytes per row], uint8; rows are padded to whole blocks.
        kind: GGUF's name of the type, one of ``KEPT``; or one of ``WITH_ZEROS`` or ``TABLES``, ``FLOATS`` or ``IN_HALVES``.
        order: the input that each place of a row has, int64, where inputs lie in another order so that those of a group lie
            together (act-order); None: they lie in their own.
    """

    raw: torch.Tensor
    kind: str
    in_features: int
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]."""
        return self.raw.shape[0], self.in_features

    def float(self) -> torch.Tensor:
        """[outputs, inputs] in float32, equal to what transformers reads from the file, or to what the format defines."""
        placed = self._as_they_lie()
        if self.order is None:
            return placed
        made = torch.empty_like(placed)
        made[:, self.order] = placed
        return made

    def _as_they_lie(self) -> torch.Tensor:
        if self.kind == FLOATS:
            return _scaled(self.raw)[:, : self.in_features]
        if self.kind in TABLES:
            return _from_table(self.raw, self.kind)[:, : self.in_features]
        if self.kind in WITH_ZEROS:
            return _less_zeros(self.raw, WITH_ZEROS[self.kind])[:, : self.in_features]
        if self.kind == IN_HALVES:
            return _less_zeros(self.raw, 4, 2)[:, : self.in_features]
        whole = torch.from_numpy(quants.dequantize(self.raw.numpy(), GGMLQuantizationType[self.kind]))
        return whole[:, : self.in_features]

    def rows(self, begin: int, end: int) -> StoredBlocks:
        """Outputs from ``begin`` to before ``end``."""
        return replace(self, raw=self.raw[begin:end])

    def finite(self) -> bool:
        """Whether all numbers are finite, which depends on the scales of each block, and on codes that are NaN."""
        if self.kind == FLOATS:
            scales, codes = _scales_and_codes(self.raw, FLOATS)
            # NaN is the one code that is no number, with either sign.
            return bool(torch.isfinite(scales * _LARGEST).all()) and not bool((codes & 0x7F == 0x7F).any())
        if self.kind in TABLES:
            scales, _ = _scales_and_codes(self.raw, self.kind)
            return bool(torch.isfinite(scales * max(TABLES[self.kind])).all())
        _, size = sizes_of(self.kind)
        blocks = self.raw.view(self.raw.shape[0], -1, size)
        if self.kind == "MXFP4":
            return bool((blocks[..., 0] <= _GREATEST_POWER).all())
        return bool(torch.isfinite(blocks[..., halves_of(self.kind)].contiguous().view(torch.float16)).all())


def _less_zeros(raw: torch.Tensor, bits: int, groups: int = 1) -> torch.Tensor:
    """(code - zero point) x scale, of which a block has as many as it has groups."""
    blocks, end = raw.reshape(len(raw), -1, 4 * groups + BLOCK * bits // 8), 4 * groups
    scales, zeros = blocks[..., :end].contiguous().view(torch.float16).float()[..., None].chunk(2, -2)
    codes = blocks[..., end:]
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
    return codes.float().reshape(*codes.shape[:2], groups, -1).sub_(zeros).mul_(scales).flatten(1)


def _scaled(raw: torch.Tensor) -> torch.Tensor:
    """Float of a byte x scale."""
    scales, codes = _scales_and_codes(raw, FLOATS)
    return codes.view(torch.float8_e4m3fn).float().mul_(scales).flatten(1)


def _from_table(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """Entry of a table x scale."""
    scales, codes = _scales_and_codes(raw, kind)
    numbers = torch.tensor(TABLES[kind], dtype=torch.float32)[torch.cat([codes & 15, codes >> 4], -1).long()]
    return numbers.mul_(scales.repeat_interleave(BLOCK // scales.shape[-1], -1)).flatten(1)


def _scales_and_codes(raw: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, blocks, scales of a block] in float32, and [outputs, blocks, bytes of its numbers]."""
    blocks, end = raw.reshape(len(raw), -1, sizes_of(kind)[1]), 4 * scales_of(kind)
    return blocks[..., :end].contiguous().view(torch.float32), blocks[..., end:].contiguous()


def sizes_of(kind: str) -> tuple[int, int]:
    """Inputs and bytes of a block."""
    if kind == FLOATS:
        return BLOCK, 4 + BLOCK
    if kind in TABLES:
        return BLOCK, 4 * scales_of(kind) + BLOCK // 2
    if kind in WITH_ZEROS:
        return BLOCK, 4 + BLOCK * WITH_ZEROS[kind] // 8
    if kind == IN_HALVES:
        return BLOCK, 8 + BLOCK // 2
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(inputs), int(size)


def scales_of(kind: str) -> int:
    """Scales in float32 that a block begins with, if it does so."""
    return 2 if kind == "E2M1" else 1 if kind == FLOATS or kind in TABLES else 0


def halves_of(kind: str) -> slice:
    """Bytes of a block that hold its float16 numbers, if there are some; if they are finite, so are all numbers."""
    return _HALVES.get(kind, slice(0, 4))


def bytes_of_row(kind: str, in_features: int) -> int:
    """Bytes of a row in whole blocks."""
    inputs, size = sizes_of(kind)
    return -(-in_features // inputs) * size


# The weight of a linear layer, [outputs, inputs].
Weight = torch.Tensor | StoredBlocks


def quantized(weight: torch.Tensor) -> StoredBlocks:
    """``weight`` as Q8_0 blocks, eight bits per number; its inputs are padded with zeros to whole blocks."""
    padded = torch.nn.functional.pad(weight.detach().float(), (0, -weight.shape[1] % BLOCK))
    raw = quants.quantize(padded.numpy(), GGMLQuantizationType.Q8_0)
    return StoredBlocks(torch.from_numpy(raw), "Q8_0", weight.shape[1])


def stored_as(weight: Weight) -> str:
    """GGUF's or torch's name of the weight's type, or ours."""
    return weight.kind if isinstance(weight, StoredBlocks) else str(weight.dtype).removeprefix("torch.")


def numbers_of(weight: Weight) -> torch.Tensor:
    """The weight as stored, blocks as the numbers that they stand for, in float32 or (MXFP4) bfloat16, which holds them."""
    if not isinstance(weight, StoredBlocks):
        return weight
    return weight.float().bfloat16() if weight.kind == "MXFP4" else weight.float()


def alike(weights: Sequence[Weight]) -> bool:
    """Whether the weights can be joined: same type, and same number and order of inputs."""
    return len({(stored_as(weight), weight.shape[1]) for weight in weights}) == 1 and same_order(weights)


def same_order(weights: Sequence[Weight]) -> bool:
    """Whether the inputs of all lie in one order."""
    first, *others = [weight.order if isinstance(weight, StoredBlocks) else None for weight in weights]
    return all(one is first or (one is not None and first is not None and torch.equal(one, first)) for one in others)


def joined(weights: Sequence[Weight]) -> Weight:
    """The weights one after the other along the outputs; they must be ``alike``."""
    if len(weights) == 1:
        return weights[0]
    blocks = [weight for weight in weights if isinstance(weight, StoredBlocks)]
    if blocks:
        return replace(blocks[0], raw=torch.cat([weight.raw for weight in blocks]))
    return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])


class StoredLinear(torch.nn.Module):
    """A linear layer with weights in blocks, until it is packed."""

    def __init__(self, weight: StoredBlocks, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        # A parameter, which is loaded from the files after this layer was made.
        self.bias = bias

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]; slow, since it unpacks the blocks."""
        return torch.nn.functional.linear(rows, self.weight.float(), self.bias)
