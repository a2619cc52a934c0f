"""Numbers that enter a product, rounded to few bits: code = round(x / scale + zero), number = (code - zero) * scale.

Arithmetic is in float32, and the numbers are those of ``InputRounding``: divisions round to the nearest, the largest of a
part is the same in any order, and no code depends on units for FP8.
"""

import triton
import triton.language as tl

# Added and taken off again, it leaves the nearest whole number, the even one of two, of those up to 2^22; and so on for
# multiples of 2^-9.
_TO_WHOLE = tl.constexpr(12582912.0)
_TO_FINE = tl.constexpr(16384.0)
# And of multiples of a half.
_TO_HALVES = tl.constexpr(4194304.0)
# Below it, numbers of FP8 (e4m3) are multiples of 2^-9.
_FINE_BELOW = tl.constexpr(2.0**-6)
# The scale of zeros alone; any other would do.
_OF_ZEROS = tl.constexpr(2.0**-23)


@triton.jit
def nearest_whole(numbers):
    """The nearest whole numbers; of at most 2^22."""
    return (numbers + _TO_WHOLE) - _TO_WHOLE


@triton.jit
def nearest_float(numbers):
    """The nearest of FP8's numbers, of at most 448: three bits behind the first."""
    size = tl.abs(numbers)
    bits = size.to(tl.int32, bitcast=True)
    coarse = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    made = tl.where(size < _FINE_BELOW, (size + _TO_FINE) - _TO_FINE, coarse)
    return tl.where(numbers < 0, -made, made)


@triton.jit
def nearest_of_four_bits(numbers):
    """The nearest floats of four bits (e2m1), of at most 6: one bit behind the first."""
    size = tl.abs(numbers)
    bits = size.to(tl.int32, bitcast=True)
    coarse = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) & -0x400000).to(tl.float32, bitcast=True)
    made = tl.where(size < 1, (size + _TO_HALVES) - _TO_HALVES, coarse)
    return tl.where(numbers < 0, -made, made)


@triton.jit
def round_rows(
    rows, made, scale, zero, global_scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FLOATS: tl.constexpr,
    SYMMETRIC: tl.constexpr, STORED: tl.constexpr, FOUR_BITS: tl.constexpr,
    POWER: tl.constexpr,
):  # fmt: skip
    """Round a part of SIZE neighbouring numbers of ``rows`` to ``made``; parts lie one after the other.

    Args:
        scale, zero: float32, if STORED; else they follow from the part.
        global_scale: of FOUR_BITS, what scales are times before they become FP8 themselves.
        LOW, HIGH: the least and the greatest code.
        POWER: the greatest power of two that is a code, where scales are powers of two; else 0.
    """
    start = tl.program_id(0).to(tl.int64) * SIZE
    lanes = tl.arange(0, BLOCK)
    if STORED:
        unit = scale
        place = zero
    else:
        above = tl.zeros((BLOCK,), tl.float32)
        below = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, SIZE, BLOCK):
            own = tl.load(rows + start + begin + lanes, mask=begin + lanes < SIZE, other=0.0).to(tl.float32)
            above = tl.maximum(above, own)
            below = tl.maximum(below, -own)
        # Zero is always among the numbers that have a code.
        most = tl.max(above, 0)
        least = tl.max(below, 0)
        if SYMMETRIC:
            reach = tl.maximum(most, least)
            unit = tl.div_rn(reach, (HIGH - LOW) / 2)
            place = 0.0
            if POWER:
                exponent = ((reach.to(tl.int32, bitcast=True) + 0x200000) >> 23) - POWER
                unit = tl.where(exponent > 0, exponent << 23, 0x400000).to(tl.float32, bitcast=True)
            elif FOUR_BITS:
                unit = nearest_float(tl.minimum(unit * global_scale, 448.0))
                unit = tl.div_rn(tl.where(unit == 0, 0.125, unit), global_scale)
        else:
            unit = tl.div_rn(most + least, HIGH - LOW)
            # So small that its scale is zero: as far as codes go.
            far = LOW + tl.div_rn(least, tl.where(unit == 0, 1.0, unit))
            far = tl.where(unit == 0, tl.where(least > 0, HIGH, 0.0), far)
            place = nearest_whole(tl.minimum(tl.maximum(far, LOW), HIGH))
        unit = tl.where(unit == 0, _OF_ZEROS, unit)
    for begin in range(0, SIZE, BLOCK):
        here = begin + lanes < SIZE
        own = tl.load(rows + start + begin + lanes, mask=here, other=0.0).to(tl.float32)
        code = tl.minimum(tl.maximum(tl.div_rn(own, tl.zeros_like(own) + unit) + place, LOW), HIGH)
        code = nearest_of_four_bits(code) if FOUR_BITS else nearest_float(code) if FLOATS else nearest_whole(code)
        # What is no number stays none.
        number = tl.where(own == own, (code - place) * unit, own)
        tl.store(made + start + begin + lanes, number.to(made.dtype.element_ty), mask=here)
