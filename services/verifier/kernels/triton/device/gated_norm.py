"""Norms of rows with a gate, which models with recurrent layers have behind these: before the norm, or behind it.

Values are rounded where transformers' modules round them. Arithmetic is in float32.
"""

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.row_norm import factor_of, scaled


@triton.jit
def _opened(gate, SIGMOID: tl.constexpr):
    """What a gate lets through: its sigmoid, or SiLU."""
    share = 1.0 / (1.0 + tl.exp(-gate))
    return share if SIGMOID else gate * share


@triton.jit
def normalise_gated(
    rows, gates, weight, made, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, ROUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """RMS normalisation of one group of one row of ``rows``, gated before (FIRST) or after; both [rows, GROUPS * WIDTH].

    Squares are summed as in ``add_and_normalise``. ``weight``: [GROUPS * WIDTH]. If ROUNDED, the row is rounded before it is
    multiplied by it, and before a gate that comes after.
    """
    number = tl.program_id(0)
    start = number.to(tl.int64) * WIDTH
    weight += number % GROUPS * WIDTH
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    numbers = ()
    opened = ()
    for begin in tl.static_range(0, WIDTH, BLOCK):
        here = begin + lanes < WIDTH
        row = tl.load(rows + start + begin + lanes, mask=here, other=0.0).to(tl.float32)
        own = _opened(tl.load(gates + start + begin + lanes, mask=here, other=0.0).to(tl.float32), SIGMOID)
        if FIRST:
            row = row * own
        squares = tl.fma(row, row, squares)
        numbers += (row,)
        opened += (own,)
    factor = factor_of(squares, WIDTH, eps)
    for turn in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
        here = turn * BLOCK + lanes < WIDTH
        own = tl.load(weight + turn * BLOCK + lanes, mask=here, other=0.0).to(tl.float32)
        normed = scaled(numbers[turn], factor, own, made, ROUNDED)
        if not FIRST:
            if ROUNDED:
                normed = normed.to(made.dtype.element_ty).to(tl.float32)
            normed = normed * opened[turn]
        tl.store(made + start + turn * BLOCK + lanes, normed.to(made.dtype.element_ty), mask=here)
