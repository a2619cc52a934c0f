"""Keys and values of eight bits: FP8 (e4m3) with a scale for each row of a head, stored once and widened at every read.

The bytes and scales are those of the kernel for CPUs (tree_attention.c), and their numbers those of ``InputRounding``: the
greatest magnitude of a row is 448 of its scales. A number is byte times scale in float32, then rounded to the type that
products take, which is exact for float32.

Of a row of n numbers byte 2 i is number i, and byte 2 i + 1 number n / 2 + i. Each number reads the pair that it is in:
Triton would permute the terms of a product, and with them the groups of sixteen, where an operand is read as single bytes,
or joined of two halves.
"""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.round_rows import nearest_float
from services.verifier.kernels.triton.device.weight_bytes import lower

_MOST = tl.constexpr(448.0)
# The scale of zeros alone; any other would do.
_OF_ZEROS = tl.constexpr(2.0**-23)
# Below it, numbers of FP8 are multiples of 2^-9.
_FINE_BELOW = tl.constexpr(2.0**-6)
# Of float32's bits: the exponents that FP8 lacks, and how far right its seven lie.
_EXPONENTS = tl.constexpr(120 << 3)
_SHIFT = tl.constexpr(20)


@triton.jit
def store_rounded(numbers, row, scale_at, SIZE: tl.constexpr, SIZES: tl.constexpr):
    """Store a row of a head, SIZE of SIZES lanes, from ``row`` on, and its scale: no number if one of them is not finite."""
    lane = tl.arange(0, SIZES)
    here = lane < SIZE
    own = tl.where(here, numbers.to(tl.float32), 0.0)
    finite = tl.abs(own) < float("inf")
    scale = tl.div_rn(tl.max(tl.where(finite, tl.abs(own), 0.0), 0), _MOST)
    scale = tl.where(scale == 0, _OF_ZEROS, scale)
    code = tl.minimum(tl.maximum(tl.div_rn(own, tl.zeros_like(own) + scale), -_MOST), _MOST)
    size = tl.abs(nearest_float(code))
    coarse = (size.to(tl.int32, bitcast=True) >> _SHIFT) - _EXPONENTS
    sign = (code.to(tl.int32, bitcast=True) >> 24) & 0x80
    byte = tl.where(size < _FINE_BELOW, (size * 512.0).to(tl.int32), coarse) | sign
    half: tl.constexpr = SIZE // 2
    tl.store(row + lane % half * 2 + lane // half, byte.to(tl.uint8), mask=here)
    tl.store(scale_at, tl.where(tl.min(finite.to(tl.int32), 0) == 1, scale, float("nan")))


@triton.jit
def widened(pairs, first, scales, like):
    """The numbers of bytes, in the type of ``like``.

    Args:
        pairs: int16, each read for both of its bytes.
        first: where the number is in the first half of its row.
        scales: of the rows.
    """
    # Between a byte and a bfloat16 number are four places.
    return (lower(tl.where(first, pairs, pairs >> 8), scales, 4) * scales).to(like.dtype)
