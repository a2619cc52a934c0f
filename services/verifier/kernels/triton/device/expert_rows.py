"""The experts of a mixture: all products of a pass in one launch each, in the order of sums of ``row_matmul``.

A *pair* is a row and one of its experts: number ``row * TOP + place``, where the row has TOP of them. Pairs are listed by
expert on the device, so nothing waits for the host. A *block* is some pairs of one expert, which one program multiplies. How
pairs lie in blocks changes no bit, since no sum has terms of two pairs but the last, which adds a row's experts in the order
of their numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.verifier.kernels.triton.device.row_matmul import LEAVES, finished, sums

# Of a block in the list: its expert, where its pairs begin in the list of pairs, and how many they are; one is not used.
BLOCK_INTS = 4
_BLOCK_INTS = tl.constexpr(BLOCK_INTS)
_LEAVES = tl.constexpr(LEAVES)
# Pairs that are read, and blocks that are written, at a time.
CHUNK = 1024
_CHUNK, _BLOCKS = tl.constexpr(CHUNK), tl.constexpr(64)


@triton.jit(do_not_specialize=["count", "most"])
def list_pairs(chosen, pairs, blocks, count, most, EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr):
    """List the pairs of one expert, ascending, behind those of the experts before it; and cut them into blocks.

    Args:
        chosen: [count], int64: the expert of each pair. Pairs of none, with a number from EXPERTS on, are not listed.
        pairs: [count], int32.
        blocks: [most, BLOCK_INTS], int32; those behind the last have no pairs.
        BINS: a power of two above EXPERTS.
        ROWS: pairs of a block, at most.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, _CHUNK)
    found = tl.zeros((BINS,), tl.int32)
    for start in range(0, count, _CHUNK):
        here = start + lane < count
        own = tl.load(chosen + start + lane, mask=here, other=EXPERTS).to(tl.int32)
        found += tl.histogram(tl.minimum(own, EXPERTS), BINS)
    number = tl.arange(0, BINS)
    of_all = tl.where(number < EXPERTS, (found + ROWS - 1) // ROWS, 0)
    begin = tl.sum(tl.where(number < expert, found, 0), 0)
    size = tl.sum(tl.where(number == expert, found, 0), 0)
    block = tl.sum(tl.where(number < expert, of_all, 0), 0)
    end = block + (size + ROWS - 1) // ROWS
    place = begin
    for start in range(0, count, _CHUNK):
        here = start + lane < count
        own = here & (tl.load(chosen + start + lane, mask=here, other=EXPERTS).to(tl.int32) == expert)
        among = tl.cumsum(own.to(tl.int32), 0)
        tl.store(pairs + place + among - 1, start + lane, mask=own)
        place += tl.sum(own.to(tl.int32), 0)
    # The last expert's program writes the blocks that nobody has, too.
    stop = tl.where(expert == EXPERTS - 1, most, end)
    for start in range(block, stop, _BLOCKS):
        each = start + tl.arange(0, _BLOCKS)
        here = each < stop
        before = (each - block) * ROWS
        at = blocks + each * _BLOCK_INTS
        tl.store(at, expert + each * 0, mask=here)
        tl.store(at + 1, begin + before, mask=here)
        tl.store(at + 2, tl.minimum(tl.maximum(size - before, 0), ROWS), mask=here)


@triton.jit
def multiply_pairs(
    rows, weight, scales, bias, made, pairs, blocks, columns, leaf, terms, apart,
    TOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, BYTES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Each pair's row times the transpose of its expert's weight; the sums are those of ``row_matmul.multiply``.

    Args:
        rows: [pairs / TOP, terms]: a row for every TOP pairs.
        weight, scales, bias: as in ``multiply``, of all experts one after the other.
        made: [pairs, columns].
        pairs, blocks: of ``list_pairs``.
        columns, leaf, terms, apart, GATED, BYTES, SHIFT: as in ``multiply``.
    """
    block = blocks + tl.program_id(0) * _BLOCK_INTS
    count = tl.load(block + 2)
    if count > 0:
        expert = tl.load(block).to(tl.int64)
        lane = tl.arange(0, ROWS)
        # Lanes behind the last pair repeat it.
        pair = tl.load(pairs + tl.load(block + 1) + tl.minimum(lane, count - 1))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        held = expert * columns * 2 if GATED else expert * columns
        own_rows = rows + (pair // TOP)[:, None].to(tl.int64) * terms
        total, other_total = sums(
            own_rows, weight + held * apart, scales + held, column, columns, leaf, terms, apart, 0, _LEAVES, ROWS, COLUMNS,
            TERMS, GATED, BYTES, SHIFT,
        )  # fmt: skip
        fits = (lane < count)[:, None] & (column < columns)[None, :]
        place = pair[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(made + place, finished(total, other_total, bias + held, column, columns, made, BIAS, GATED), mask=fits)


@triton.jit
def add_pairs(
    made, chosen, factors, total, columns,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, TOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what a row's experts made, times its factors, each product rounded, in the order of the experts' numbers.

    Args:
        made: [rows, TOP, columns].
        chosen, factors: [rows, TOP]; an expert from EXPERTS on is none.
        total: [rows, columns].
        TOPS: a power of two, at least TOP.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, TOPS)
    own = tl.minimum(tl.load(chosen + row * TOP + lane, mask=lane < TOP, other=EXPERTS).to(tl.int32), EXPERTS)
    # How many of a row's pairs come before each: of two with one expert, the first one.
    less = (own[None, :] < own[:, None]) | ((own[None, :] == own[:, None]) & (lane[None, :] < lane[:, None]))
    rank = tl.sum(less.to(tl.int32), 1)
    so_far = tl.zeros((BLOCK,), tl.float32)
    for turn in range(TOP):
        at = row * TOP + tl.sum(tl.where(rank == turn, lane, 0), 0)
        expert = tl.sum(tl.where(rank == turn, own, 0), 0)
        # Nothing, of no expert.
        here = column < tl.where(expert < EXPERTS, columns, 0)
        number = tl.load(made + at * columns + column, mask=here, other=0.0).to(tl.float32)
        part = (number * tl.load(factors + at).to(tl.float32)).to(total.dtype.element_ty).to(tl.float32)
        so_far = tl.where(here, so_far + part, so_far)
    tl.store(total + row * columns + column, so_far.to(total.dtype.element_ty), mask=column < columns)
