"""Products with weights whose sums do not depend on the other rows.

The order of a sum is a part of the layer: its terms are cut into *leaves* of a fixed length; each leaf is summed from its
first term to its last, from nothing, and leaves are added in ascending order, in float32. So it does not matter how many
rows and columns a program has, nor whether leaves are computed by programs of their own (few rows) or one after the other
(prompts).
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.leaves import summed
from services.verifier.kernels.triton.device.row_norm import gated


@triton.jit(do_not_specialize=["count"])
def multiply(
    rows, weight, bias, made, count, columns, leaf, terms,
    LEAVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, BIAS: tl.constexpr,
    SPLIT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """``rows``, [count, terms], times the transpose of ``weight``, [columns, terms].

    If GATED, ``weight`` has as many rows more: SiLU of the first ones' product times the second ones'.

    Args:
        made: [count, columns]; if SPLIT [LEAVES, count, columns], float32, of one leaf each, without bias.
        leaf: terms of a leaf, a multiple of TERMS and at least two times it: one product alone would be merged with the
            addition that follows.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows and columns behind the last repeat it.
    own_rows = rows + tl.minimum(row, count - 1)[:, None].to(tl.int64) * terms
    own_weight = weight + tl.minimum(column, columns - 1)[None, :].to(tl.int64) * terms
    fits = (row < count)[:, None] & (column < columns)[None, :]
    first = tl.program_id(2) if SPLIT else 0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    other_weight = own_weight + tl.cast(columns, tl.int64) * terms
    other_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(first, first + 1 if SPLIT else LEAVES):
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        other_part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(number * leaf, tl.minimum((number + 1) * leaf, terms), TERMS):
            term = start + tl.arange(0, TERMS)
            left = tl.load(own_rows + term[None, :], mask=(term < terms)[None, :], other=0.0)
            right = tl.load(own_weight + term[:, None], mask=(term < terms)[:, None], other=0.0)
            part = tl.dot(left, right, part, input_precision="ieee")
            if GATED:
                right = tl.load(other_weight + term[:, None], mask=(term < terms)[:, None], other=0.0)
                other_part = tl.dot(left, right, other_part, input_precision="ieee")
        total = total + part
        other_total = other_total + other_part
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    if SPLIT:
        tl.store(made + first.to(tl.int64) * count * columns + place, total, mask=fits)
    else:
        if BIAS:
            total = total + tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total = total.to(made.dtype.element_ty).to(tl.float32)
            total = gated(total, other_total.to(made.dtype.element_ty).to(tl.float32), made)
        tl.store(made + place, total.to(made.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["numbers"])
def add_leaves(parts, bias, made, numbers, columns, LEAVES: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Add the leaves of ``multiply``; ``numbers``: rows times columns."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < numbers
    total = summed(parts, place, here, numbers, bias, place % columns, made, LEAVES, BIAS)
    tl.store(made + place, total.to(made.dtype.element_ty), mask=here)


@triton.jit
def one_product(left, right, made, ROWS: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr):
    """``made``, [ROWS, COLUMNS], float32, of ``left``, [ROWS, TERMS], and ``right``, [TERMS, COLUMNS]."""
    row, term, column = tl.arange(0, ROWS), tl.arange(0, TERMS), tl.arange(0, COLUMNS)
    first = tl.load(left + row[:, None] * TERMS + term[None, :])
    second = tl.load(right + term[:, None] * COLUMNS + column[None, :])
    made_at = made + row[:, None] * COLUMNS + column[None, :]
    tl.store(made_at, tl.dot(first, second, tl.load(made_at), input_precision="ieee"))
