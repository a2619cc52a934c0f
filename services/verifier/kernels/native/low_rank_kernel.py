"""Low-rank products on a CPU with a native kernel, which are added to those of linear layers; see low_rank.c."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.verifier.kernels.native.library import Library

# Must equal the constants in vectors.h and low_rank.h.
_COLUMNS = 16
_PIECES = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """Adds up * scale * (down * x) to what a linear layer makes of x.

    Attributes:
        down: [rank, inputs].
        up: [outputs, rank].
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float = 1.0

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        """The same there."""
        down, up = (each.to(device, dtype).contiguous() for each in (self.down, self.up))
        return LowRank(down=down, up=up, scale=self.scale)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """What is added for these rows, [..., inputs]: [..., outputs]."""
        return functional.linear(functional.linear(rows, self.down) * self.scale, self.up)


class LowRankStruct(ctypes.Structure):
    """The struct in low_rank.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("down", "up")],
        ("scale", ctypes.c_float),
        ("halves", ctypes.c_int32),
        *[(name, ctypes.c_int64) for name in ("inputs", "rank", "outputs", "at", "begin")],
    ]


class LowRanksStruct(ctypes.Structure):
    """Likewise: the products of one input."""

    _fields_ = [("part", LowRankStruct * 3), ("count", ctypes.c_int64)]


class SpanStruct(ctypes.Structure):
    """Likewise: neighbouring rows, and where the products are that are added to theirs."""

    _fields_ = [("by", ctypes.c_void_p), ("first", ctypes.c_int64), ("rows", ctypes.c_int64)]


class PackedLowRank:
    """A low-rank product as the kernel reads it: in bfloat16 where that holds all its numbers, else as floats.

    Args:
        at: where its outputs begin in a row of outputs.
        begin: where its inner numbers begin in a row of inner numbers.

    Attributes:
        inner: the inner numbers of a row that it takes.
    """

    def __init__(self, product: LowRank, at: int = 0, begin: int = 0) -> None:
        (rank, inputs), outputs = product.down.shape, product.up.shape[0]
        missing = -rank % _COLUMNS
        rank += missing
        self.inner = rank * _PIECES
        down, up = product.down.detach().float(), product.up.detach().float()
        # Files often hold numbers of bfloat16 as floats. A row takes as long as the numbers take to be read.
        halves = all(torch.equal(each, each.bfloat16().float()) for each in (down, up))
        if halves:
            down, up = down.bfloat16(), up.bfloat16()
        self._down = functional.pad(down.T, (0, missing)).contiguous()
        panels = functional.pad(up, (0, missing, 0, -outputs % _COLUMNS)).view(-1, _COLUMNS, rank)
        self._up = panels.transpose(1, 2).contiguous()
        pointers = self._down.data_ptr(), self._up.data_ptr()
        self.struct = LowRankStruct(*pointers, product.scale, halves, inputs, rank, outputs, at, begin)


class AddLowRank:
    """Adds low-rank products to rows that a linear layer has made."""

    def __init__(self, kernels: Library) -> None:
        self._kernel = kernels.functions.outrider_low_rank
        self._kernel.argtypes = [
            ctypes.POINTER(SpanStruct), *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p,
            ctypes.c_int64,
        ]  # fmt: skip
        self._kernel.restype = None

    def __call__(self, product: PackedLowRank, given: torch.Tensor, made: torch.Tensor) -> None:
        """Add to ``made``, [rows, outputs], in place, what the product makes of ``given``, [rows, inputs].

        Raises:
            ValueError: of another shape or type, which the kernel itself could not notice.
        """
        struct, rows = product.struct, len(given)
        if (
            given.shape != (rows, struct.inputs)
            or made.shape != (rows, struct.outputs)
            or not given.dtype == made.dtype == torch.float32
            or made.stride(1) != 1
        ):
            raise ValueError(f"rows are {tuple(given.shape)} {given.dtype}, made {tuple(made.shape)} {made.dtype}")
        given = given.contiguous()
        inner = torch.empty(rows, product.inner, dtype=torch.float32)
        alone = LowRanksStruct((LowRankStruct * 3)(struct), 1)
        span = SpanStruct(ctypes.addressof(alone), 0, rows)
        self._kernel(span, 1, 0, given.data_ptr(), inner.data_ptr(), product.inner, made.data_ptr(), made.stride(0))
