"""What stands between a layer's products, row by row: a norm with the residual, and the gate of the feed-forward part.

Values are rounded where transformers' modules round them. Arithmetic is in float32.
"""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.leaves import summed


@triton.jit
def factor_of(squares, width, eps):
    """What a row is multiplied by, from the sums of its squares in each lane."""
    return tl.rsqrt(tl.sum(squares, 0) / width + eps)


@triton.jit
def scaled(row, factor, weight, like, ROUNDED: tl.constexpr):
    """Numbers of a row times ``factor`` and ``weight``, float32; if ROUNDED, to the type of ``like`` in between."""
    made = row * factor
    if ROUNDED:
        made = made.to(like.dtype.element_ty).to(tl.float32)
    return made * weight


@triton.jit(do_not_specialize=["apart"])
def add_and_normalise(
    rows, bias, residual, weight, total, made, eps, apart,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, ROUNDED: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """RMS normalisation of one row of ``rows`` + ``residual``, both [rows, WIDTH]; the sum itself goes to ``total``.

    Squares are summed in BLOCK lanes, then over the lanes: the same order for every row. If ROUNDED, the row is rounded
    before it is multiplied by ``weight``. ``rows`` is a product, whose parts may not be added yet (``leaves.summed``).
    """
    start = tl.program_id(0).to(tl.int64) * WIDTH
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    # The row stays in registers. Its loads do not wait for each other, since the loops are unrolled.
    numbers = ()
    for begin in tl.static_range(0, WIDTH, BLOCK):
        here = begin + lanes < WIDTH
        row = summed(rows, start + begin + lanes, here, apart, bias, begin + lanes, made, PARTS, BIAS)
        if RESIDUAL:
            before = tl.load(residual + start + begin + lanes, mask=here, other=0.0).to(tl.float32)
            rounded = (row + before).to(made.dtype.element_ty)
            tl.store(total + start + begin + lanes, rounded, mask=here)
            row = rounded.to(tl.float32)
        squares = tl.fma(row, row, squares)
        numbers += (row,)
    factor = factor_of(squares, WIDTH, eps)
    for turn in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
        here = turn * BLOCK + lanes < WIDTH
        own = tl.load(weight + turn * BLOCK + lanes, mask=here, other=0.0).to(tl.float32)
        normed = scaled(numbers[turn], factor, own, made, ROUNDED)
        tl.store(made + start + turn * BLOCK + lanes, normed.to(made.dtype.element_ty), mask=here)


@triton.jit
def gated(first, second, like):
    """SiLU of ``first``, rounded to the type of ``like``, times ``second``; float32."""
    return (first / (1.0 + tl.exp(-first))).to(like.dtype.element_ty).to(tl.float32) * second


@triton.jit(do_not_specialize=["apart"])
def gate(both, made, width, apart, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """SiLU of the first half of a row of ``both``, [rows, 2 * width], times its second half: [rows, width].

    ``both`` is a product, whose parts may not be added yet (``leaves.summed``).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    first = summed(both, row * 2 * width + column, here, apart, both, column, made, PARTS, False)
    second = summed(both, row * 2 * width + width + column, here, apart, both, column, made, PARTS, False)
    tl.store(made + row * width + column, gated(first, second, made).to(made.dtype.element_ty), mask=here)
