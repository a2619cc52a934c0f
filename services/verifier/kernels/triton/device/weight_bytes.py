"""Weights of eight bits, two in each int16, made bfloat16 numbers of the very same value in registers.

A byte is a sign and seven bits, which are the first bits behind the sign of a bfloat16 number, moved to the right by some
places. For fp8 (e4m3, four bits of exponent) these are four: the number is 2^-120 of the byte's. For int8, as sign and
magnitude, there are none to move: the bits are the last of a bfloat16 number, below its normal ones, 2^-133 each. Either way
one multiplication by 2^120 makes a normal number, exactly. So a GPU without units for fp8 serves as well.

The first of two weights is the lower byte. They are read as pairs because Triton would permute the terms of a product, and
with them the groups of sixteen, where its operands are read as single bytes.
"""

import triton
import triton.language as tl

_GROWTH = tl.constexpr(2.0**120)


@triton.jit
def lower(pairs, like, SHIFT: tl.constexpr):
    """The first weight of each of ``pairs``, in the type of ``like``; SHIFT: places between a byte and a bfloat16 number."""
    return _numbers(((pairs & 0x7F) << SHIFT) | ((pairs & 0x80) << 8), like)


@triton.jit
def upper(pairs, like, SHIFT: tl.constexpr):
    """The second weight of each of ``pairs``, as ``lower``."""
    return _numbers(((pairs >> (8 - SHIFT)) & (0x7F << SHIFT)) | (pairs & -0x8000), like)


@triton.jit
def _numbers(bits, like):
    return (bits.to(tl.bfloat16, bitcast=True) * _GROWTH).to(like.dtype)
