"""Products with weights whose sums do not depend on the other rows.

The order of a sum is a part of the layer, and depends on the number of its terms alone: they are cut into eight *leaves* of
equal length; each leaf is summed from its first term to its last, from nothing, and where weights have eight bits multiplied
by the column's scale; neighbours are added in float32, then neighbours of those, as a binary tree. So it does not matter how
many rows and columns a program has, nor how many leaves of the tree: a program computes a *part*, which is a subtree, or all
of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.leaves import summed
from services.verifier.kernels.triton.device.row_norm import gated
from services.verifier.kernels.triton.device.weight_bytes import lower, upper

# Of the tree that is a layer's sum.
LEAVES = 8
_LEAVES = tl.constexpr(LEAVES)


@triton.jit(do_not_specialize=["count"])
def multiply(
    rows, weight, scales, bias, made, count, columns, leaf, terms, apart,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, BYTES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """``rows``, [count, terms], times the transpose of ``weight``, [columns, terms].

    If GATED, ``weight`` has as many rows more: SiLU of the first ones' product times the second ones'.

    Args:
        weight: one row every ``apart`` numbers. If BYTES, int16: of every TERMS weights, padded with zeros, each number has
            one of the first half and one of the second (``weight_bytes``; SHIFT as there).
        scales: [columns], float32: what each leaf of a column is multiplied by; read if BYTES.
        made: [count, columns]; if PARTS is above 1 [PARTS, count, columns], float32, of a part each, without bias.
        leaf: terms of a leaf, a multiple of TERMS and at least two times it: one product alone would be merged with the
            addition that follows.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows and columns behind the last repeat it.
    own_rows = rows + tl.minimum(row, count - 1)[:, None].to(tl.int64) * terms
    fits = (row < count)[:, None] & (column < columns)[None, :]
    each: tl.constexpr = _LEAVES // PARTS
    total, other_total = sums(
        own_rows, weight, scales, column, columns, leaf, terms, apart, tl.program_id(2) * each, each, ROWS, COLUMNS, TERMS,
        GATED, BYTES, SHIFT,
    )  # fmt: skip
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    if PARTS > 1:
        tl.store(made + tl.program_id(2).to(tl.int64) * count * columns + place, total, mask=fits)
    else:
        tl.store(made + place, finished(total, other_total, bias, column, columns, made, BIAS, GATED), mask=fits)


@triton.jit
def sums(
    own_rows, weight, scales, column, columns, leaf, terms, apart, first,
    EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, GATED: tl.constexpr,
    BYTES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The sums of EACH leaves from leaf ``first`` on, [ROWS, COLUMNS], float32; if GATED those of the other half as well.

    Args:
        own_rows: where each row begins, [ROWS, 1].
        column: [COLUMNS]; those from ``columns`` on repeat the last one.
        weight, scales, leaf, terms, apart: as in ``multiply``.
    """
    own_column = tl.minimum(column, columns - 1)
    own_weight = weight + own_column[None, :].to(tl.int64) * apart
    other_weight = own_weight + tl.cast(columns, tl.int64) * apart
    # Of the tree: what its nodes of each height wait with for their right neighbour.
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    two = tl.zeros((ROWS, COLUMNS), tl.float32)
    four = tl.zeros((ROWS, COLUMNS), tl.float32)
    other_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    other_two = tl.zeros((ROWS, COLUMNS), tl.float32)
    other_four = tl.zeros((ROWS, COLUMNS), tl.float32)
    part = tl.zeros((ROWS, COLUMNS), tl.float32)
    other_part = tl.zeros((ROWS, COLUMNS), tl.float32)
    # One loop over the terms of all leaves, so that copies of the next operands do not wait at the end of each leaf.
    own_leaf = leaf // TERMS
    begin = first * own_leaf
    stop = tl.minimum(begin + EACH * own_leaf, tl.cdiv(terms, TERMS))
    for tile in range(begin, stop):
        start = tile * TERMS
        if BYTES:
            lane = tl.arange(0, TERMS // 2)
            left = _of_rows(own_rows, start + lane, terms)
            after = _of_rows(own_rows, start + TERMS // 2 + lane, terms)
            pair = (start // 2 + lane)[:, None]
            part = _plus_pairs(part, left, after, own_weight + pair, SHIFT)
            if GATED:
                other_part = _plus_pairs(other_part, left, after, other_weight + pair, SHIFT)
        else:
            term = start + tl.arange(0, TERMS)
            left = _of_rows(own_rows, term, terms)
            right = tl.load(own_weight + term[:, None], mask=(term < terms)[:, None], other=0.0)
            part = tl.dot(left, right, part, input_precision="ieee")
            if GATED:
                right = tl.load(other_weight + term[:, None], mask=(term < terms)[:, None], other=0.0)
                other_part = tl.dot(left, right, other_part, input_precision="ieee")
        # Only the outer condition is known when this is compiled.
        if EACH > 1:  # noqa: SIM102
            if (tile + 1) % own_leaf == 0:
                number = tile // own_leaf - first
                total, two, four, part = _ended(total, two, four, part, number, scales, own_column, BYTES)
                if GATED:
                    other_total, other_two, other_four, other_part = _ended(
                        other_total, other_two, other_four, other_part, number, scales, columns + own_column, BYTES
                    )
    if EACH == 1:
        total = _scaled(part, scales, own_column, BYTES)
        if GATED:
            other_total = _scaled(other_part, scales, columns + own_column, BYTES)
    else:
        # A leaf that ends with the last term, and those that have none.
        for number in range((stop - begin) // own_leaf, EACH):
            total, two, four, part = _ended(total, two, four, part, number, scales, own_column, BYTES)
            if GATED:
                other_total, other_two, other_four, other_part = _ended(
                    other_total, other_two, other_four, other_part, number, scales, columns + own_column, BYTES
                )
    return total, other_total


@triton.jit
def finished(total, other_total, bias, column, columns, made, BIAS: tl.constexpr, GATED: tl.constexpr):
    """What a layer makes of its sums, in the type of ``made``; arguments as in ``multiply`` and ``sums``."""
    if BIAS:
        total = total + tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total.to(made.dtype.element_ty).to(tl.float32)
        total = gated(total, other_total.to(made.dtype.element_ty).to(tl.float32), made)
    return total.to(made.dtype.element_ty)


@triton.jit
def _ended(total, two, four, part, number, scales, column, BYTES: tl.constexpr):
    """The tree with leaf ``number``, whose sum is ``part``, and the next leaf's sum, of nothing yet."""
    total, two, four = grown(total, two, four, _scaled(part, scales, column, BYTES), number)
    return total, two, four, tl.zeros_like(part)


@triton.jit
def _scaled(part, scales, column, BYTES: tl.constexpr):
    if BYTES:
        part = part * tl.load(scales + column)[None, :]
    return part


@triton.jit
def _plus_pairs(part, left, after, pairs, SHIFT: tl.constexpr):
    """``part`` with the products of the terms in ``left``, and then of those in ``after``, by the bytes of ``pairs``."""
    both = tl.load(pairs)
    part = tl.dot(left, lower(both, left, SHIFT), part, input_precision="ieee")
    return tl.dot(after, upper(both, left, SHIFT), part, input_precision="ieee")


@triton.jit
def _of_rows(own_rows, term, terms):
    return tl.load(own_rows + term[None, :], mask=(term < terms)[None, :], other=0.0)


@triton.jit
def grown(one, two, four, leaf, number):
    """The sums of 1, 2 and 4 leaves that wait for a right neighbour, after leaf ``number``.

    Behind the last leaf of a tree the first of them holds its root.
    """
    pair = one + leaf
    quartet = two + pair
    odd = number % 2 == 1
    fourth = number % 4 == 3
    eighth = number % 8 == 7
    root = tl.where(eighth, four + quartet, tl.where(fourth, quartet, tl.where(odd, pair, leaf)))
    return root, tl.where(odd, pair, two), tl.where(fourth, quartet, four)


@triton.jit(do_not_specialize=["numbers"])
def add_parts(parts, bias, made, numbers, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Add the parts of ``multiply``; ``numbers``: rows times columns."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = place < numbers
    total = summed(parts, place, here, numbers, bias, place % columns, made, PARTS, BIAS)
    tl.store(made + place, total.to(made.dtype.element_ty), mask=here)


@triton.jit
def one_product(left, right, made, ROWS: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr):
    """``made``, [ROWS, COLUMNS], float32, of ``left``, [ROWS, TERMS], and ``right``, [TERMS, COLUMNS]."""
    row, term, column = tl.arange(0, ROWS), tl.arange(0, TERMS), tl.arange(0, COLUMNS)
    first = tl.load(left + row[:, None] * TERMS + term[None, :])
    second = tl.load(right + term[:, None] * COLUMNS + column[None, :])
    made_at = made + row[:, None] * COLUMNS + column[None, :]
    tl.store(made_at, tl.dot(first, second, tl.load(made_at), input_precision="ieee"))
