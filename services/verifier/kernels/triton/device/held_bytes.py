"""Keys and values of eight bits: FP8 (e4m3) with a scale for each row of a head, stored once and widened at every read.

The bytes and scales are those of the kernel for CPUs (tree_attention.c), and their numbers those of ``InputRounding``: the
greatest magnitude of a row is 448 of its scales. A number is byte times scale in float32, then rounded to the type that
products take, which is exact for float32.
"""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.round_rows import nearest_float
from services.verifier.kernels.triton.device.weight_bytes import lower, upper

_MOST = tl.constexpr(448.0)
# The scale of zeros alone; any other would do.
_OF_ZEROS = tl.constexpr(2.0**-23)
# Below it, numbers of FP8 are multiples of 2^-9.
_FINE_BELOW = tl.constexpr(2.0**-6)
# Of float32's bits: the exponents that FP8 lacks, and how far right its seven lie.
_EXPONENTS = tl.constexpr(120 << 3)
_SHIFT = tl.constexpr(20)


@triton.jit
def store_rounded(numbers, here, bytes_at, scale_at):
    """Store a row of a head, the lanes that are ``here``: a byte at each of ``bytes_at``, and its scale.

    The scale is no number if one of the row is not finite.
    """
    own = tl.where(here, numbers.to(tl.float32), 0.0)
    finite = tl.abs(own) < float("inf")
    scale = tl.div_rn(tl.max(tl.where(finite, tl.abs(own), 0.0), 0), _MOST)
    scale = tl.where(scale == 0, _OF_ZEROS, scale)
    code = tl.minimum(tl.maximum(tl.div_rn(own, tl.zeros_like(own) + scale), -_MOST), _MOST)
    size = tl.abs(nearest_float(code))
    coarse = (size.to(tl.int32, bitcast=True) >> _SHIFT) - _EXPONENTS
    sign = (code.to(tl.int32, bitcast=True) >> 24) & 0x80
    byte = tl.where(size < _FINE_BELOW, (size * 512.0).to(tl.int32), coarse) | sign
    tl.store(bytes_at, byte.to(tl.uint8), mask=here)
    tl.store(scale_at, tl.where(tl.min(finite.to(tl.int32), 0) == 1, scale, float("nan")))


@triton.jit
def widened(pairs, scales, like):
    """[rows, 2 * columns] in the type of ``like``, of bytes in pairs, int16, [rows, columns], and the rows' scales.

    Pairs, not bytes, for the reason in ``weight_bytes``: the terms of products keep their order.
    """
    # Between a byte and a bfloat16 number are four places.
    numbers = tl.interleave(lower(pairs, scales, 4), upper(pairs, scales, 4))
    return (numbers * scales[:, None]).to(like.dtype)
