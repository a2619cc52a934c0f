"""Sums of products are a binary tree of eight leaves; a part is the sum of some neighbours among them, a subtree's.

The kernel that reads parts adds them, so none is launched for that alone.
"""

import triton
import triton.language as tl


@triton.jit
def summed(parts, place, here, apart, bias, column, like, PARTS: tl.constexpr, BIAS: tl.constexpr):
    """The numbers at ``place``, float32, rounded as the layer rounds them; 0 where not ``here``.

    Args:
        parts: the finished product if PARTS is 0, else so many parts (2, 4 or 8), float32, one every ``apart`` numbers.
        bias: by ``column``; read if BIAS, which a finished product has in it.
        like: points to numbers of the type to which the layer rounds.
    """
    if PARTS == 0:
        total = tl.load(parts + place, mask=here, other=0.0).to(tl.float32)
    else:
        if PARTS == 8:
            total = _four(parts, place, here, apart, 0) + _four(parts, place, here, apart, 4)
        elif PARTS == 4:
            total = _four(parts, place, here, apart, 0)
        else:
            total = _two(parts, place, here, apart, 0)
        if BIAS:
            total = total + tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
        total = total.to(like.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def _two(parts, place, here, apart, first: tl.constexpr):
    one = tl.load(parts + first * apart + place, mask=here, other=0.0)
    return one + tl.load(parts + (first + 1) * apart + place, mask=here, other=0.0)


@triton.jit
def _four(parts, place, here, apart, first: tl.constexpr):
    return _two(parts, place, here, apart, first) + _two(parts, place, here, apart, first + 2)
