"""What stands between a layer's products, row by row: a norm with the residual, and the gate of the feed-forward part.

Values are rounded where transformers' modules round them. Arithmetic is in float32.
"""

import triton
import triton.language as tl


@triton.jit
def add_and_normalise(
    rows, residual, weight, summed, made, width, eps,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """RMS normalisation of one row of ``rows`` + ``residual``, both [rows, width]; the sum itself goes to ``summed``.

    Squares are summed in BLOCK lanes, then over the lanes: the same order for every row. If ROUNDED, the row is rounded
    before it is multiplied by ``weight``.
    """
    start = tl.program_id(0).to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        here = begin + lanes < width
        row = tl.load(rows + start + begin + lanes, mask=here, other=0.0).to(tl.float32)
        if RESIDUAL:
            before = tl.load(residual + start + begin + lanes, mask=here, other=0.0).to(tl.float32)
            rounded = (row + before).to(made.dtype.element_ty)
            tl.store(summed + start + begin + lanes, rounded, mask=here)
            row = rounded.to(tl.float32)
        squares = tl.fma(row, row, squares)
    factor = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    source = summed if RESIDUAL else rows
    for begin in range(0, width, BLOCK):
        here = begin + lanes < width
        row = tl.load(source + start + begin + lanes, mask=here, other=0.0).to(tl.float32)
        scaled = row * factor
        if ROUNDED:
            scaled = scaled.to(made.dtype.element_ty).to(tl.float32)
        scaled *= tl.load(weight + begin + lanes, mask=here, other=0.0).to(tl.float32)
        tl.store(made + start + begin + lanes, scaled.to(made.dtype.element_ty), mask=here)


@triton.jit
def gate(both, made, width, BLOCK: tl.constexpr):
    """SiLU of the first half of a row of ``both``, [rows, 2 * width], times its second half: [rows, width]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    first = tl.load(both + row * 2 * width + column, mask=here, other=0.0).to(tl.float32)
    second = tl.load(both + row * 2 * width + width + column, mask=here, other=0.0).to(tl.float32)
    active = (first / (1.0 + tl.exp(-first))).to(made.dtype.element_ty).to(tl.float32)
    tl.store(made + row * width + column, (active * second).to(made.dtype.element_ty), mask=here)
