"""Products whose leaves are not added yet. The kernel that reads them adds them, so none is launched for that alone."""

import triton
import triton.language as tl


@triton.jit
def summed(parts, place, here, apart, bias, column, like, LEAVES: tl.constexpr, BIAS: tl.constexpr):
    """The numbers at ``place``, float32, rounded as the layer rounds them; 0 where not ``here``.

    Args:
        parts: the finished product if LEAVES is 0, else that many leaves, float32, one every ``apart`` numbers.
        bias: by ``column``; read if BIAS, which a finished product has in it.
        like: points to numbers of the type to which the layer rounds.
    """
    if LEAVES == 0:
        total = tl.load(parts + place, mask=here, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(place.shape, tl.float32)
        for leaf in range(LEAVES):
            total = total + tl.load(parts + leaf * apart + place, mask=here, other=0.0)
        if BIAS:
            total = total + tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
        total = total.to(like.dtype.element_ty).to(tl.float32)
    return total
