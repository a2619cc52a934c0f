"""What the kernels read of a pass besides keys and values: one array of int32, which takes one copy to the GPU.

    positions   [rows]
    slots       [rows], where each row's key and value are stored: KV block * TILE + slot in that block
    sums        [rows], how many segments all rows before have: where the sums of a row's segments begin
    blocks      [rows, 4]: request, first row, rows, last position. At most as many blocks as rows; request 0: none
    work        two numbers: of how many parts the work is, and their place
    requests    each 8 numbers: first row in the pass, rows, then the places of its table, its tail's first tile, the places
                of its tail, chunks and words, and the number of words of each row
    tables      the requests' KV blocks, by position
    tails       where the chunks of each of the tail's tiles begin; the last entry is where they end
    chunks      64 slots, four virtual groups, in the form of ``slots``, and the 64 positions that they hold
    words       by row and chunk, two numbers: which of the 64 slots the row sees
    parts       each two numbers: a block and one of the segments up to its last position. Not there where a program
                computes all segments of a block: the blocks are the work then

A *block* is some rows of one request that read keys and values together. A *tail* is the tiles of positions in which a tree
has nodes; there the slots that rows see are no longer consecutive (``virtual_groups``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.verifier.attention.calls import TILE
from services.verifier.kernels.triton.virtual_groups import GROUP, Pack, pack
from services.verifier.model.target_port import Rows
from speculation.tree import ROOT

SEGMENT = 8 * TILE
BLOCK_INTS = 4
WORK_INTS = 2
REQUEST_INTS = 8
CHUNK_GROUPS = TILE // GROUP
# Tables of requests without a tree have no tail: its first tile lies behind all others.
_NO_TAIL = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class PassMeta:
    """A pass as the kernels read it.

    Attributes:
        numbers: int32, as described above.
        tokens: [rows], padded.
    """

    numbers: NDArray[np.int32]
    tokens: list[int]


def slots_at(rows: int) -> int:
    """Where the rows' slots begin."""
    return rows


def sums_at(rows: int) -> int:
    """Where it begins at which place the sums of a row's segments begin."""
    return 2 * rows


def blocks_at(rows: int) -> int:
    """Where the blocks begin."""
    return 3 * rows


def work_at(rows: int) -> int:
    """Where the number of parts of the work is, and their place behind it."""
    return blocks_at(rows) + BLOCK_INTS * rows


def positions_of(rows: Rows) -> list[int]:
    """The position of each of a request's rows."""
    positions = list(range(rows.context, rows.context + rows.chain))
    for parent in rows.parents:
        positions.append(positions[rows.chain - 1 if parent == ROOT else rows.chain + parent] + 1)
    return positions


class _Builder:
    """Collects the parts whose sizes differ from pass to pass; they lie behind the blocks."""

    def __init__(self, rows: int) -> None:
        self.head = np.zeros(work_at(rows) + WORK_INTS, dtype=np.int32)
        self._rows = rows
        self._rest: list[NDArray[np.int32]] = []
        self._end = len(self.head)
        self._blocks = 0

    def append(self, numbers: Sequence[int] | NDArray[np.int32]) -> int:
        """Returns where they begin."""
        at = self._end
        self._rest.append(np.asarray(numbers, dtype=np.int32).reshape(-1))
        self._end += len(self._rest[-1])
        return at

    def add_blocks(self, request: int, positions: Sequence[int], block_rows: int) -> None:
        for first in range(0, len(positions), block_rows):
            members = positions[first : first + block_rows]
            at = blocks_at(self._rows) + BLOCK_INTS * self._blocks
            self.head[at : at + BLOCK_INTS] = (request, first, len(members), max(members))
            self._blocks += 1

    def add_work(self, split: bool) -> None:
        """All requests and blocks are there."""
        rows = self._rows
        segments = self.head[:rows] // SEGMENT + 1
        self.head[sums_at(rows) : blocks_at(rows)] = np.cumsum(segments) - segments
        work = [self._blocks, 0]
        if split:
            lasts = self.head[blocks_at(rows) : work_at(rows)].reshape(-1, BLOCK_INTS)[: self._blocks, -1]
            parts = [(block, segment) for block, last in enumerate(lasts.tolist()) for segment in range(last // SEGMENT + 1)]
            work = [len(parts), self.append(np.array(parts))]
        self.head[work_at(rows) :] = work

    def numbers(self) -> NDArray[np.int32]:
        return np.concatenate([self.head, *self._rest])


def describe(
    batch: Sequence[Rows],
    tables: Sequence[Sequence[int]],
    padding_block: int,
    rows: int,
    block_rows: int,
    split: bool,
    pack: Pack = pack,
) -> PassMeta:
    """Describe a pass.

    Args:
        tables: each request's tiles in the pool, by position.
        padding_block: KV block that no request owns.
        rows: number of rows, padding included.
        block_rows: most rows of a block.
        split: whether segments of a block are computed apart.
        pack: puts the nodes of a tree into groups.
    """
    built = _Builder(rows)
    tokens: list[int] = []
    for request, table in zip(batch, tables, strict=True):
        first, count = len(tokens), len(request.tokens)
        positions = positions_of(request)
        own = np.asarray(table, dtype=np.int32)
        slots = np.arange(request.context, request.context + count)
        built.head[first : first + count] = positions
        built.head[slots_at(rows) + first : slots_at(rows) + first + count] = own[slots // TILE] * TILE + slots % TILE
        used = own[: (request.context + count - 1) // TILE + 1]
        record = [first, count, built.append(used), *_tail(built, request, own, pack)]
        built.add_blocks(built.append(record), positions, block_rows)
        tokens += request.tokens
    missing = rows - len(tokens)
    if missing:
        # Padding rows are a request of their own, all at position 0, whose key each of them overwrites.
        built.head[slots_at(rows) + len(tokens) : slots_at(rows) + rows] = padding_block * TILE
        record = [len(tokens), missing, built.append([padding_block]), _NO_TAIL, 0, 0, 0, 0]
        built.add_blocks(built.append(record), [0] * missing, block_rows)
    built.add_work(split)
    return PassMeta(numbers=built.numbers(), tokens=tokens + [0] * missing)


def _tail(built: _Builder, request: Rows, table: NDArray[np.int32], pack: Pack) -> list[int]:
    """The last five numbers of a request's record."""
    if not request.parents:
        return [_NO_TAIL, 0, 0, 0, 0]
    tiles = pack(request.context, request.chain, request.parents, TILE)
    begins = [0]
    for groups in tiles:
        begins.append(begins[-1] + -(-len(groups) // CHUNK_GROUPS))
    slots = np.zeros((begins[-1], 2, CHUNK_GROUPS, GROUP), dtype=np.int32)
    # Lanes that nobody sees read the request's first slot, which holds numbers.
    slots[:, 0] = table[0] * TILE
    words = np.zeros((len(request.tokens), begins[-1], CHUNK_GROUPS), dtype=np.uint16)
    for begin, groups in zip(begins, tiles, strict=False):
        for index, group in enumerate(groups):
            chunk, part = begin + index // CHUNK_GROUPS, index % CHUNK_GROUPS
            own = np.asarray(group.slots)
            slots[chunk, 0, part, : len(own)] = table[own // TILE] * TILE + own % TILE
            slots[chunk, 1, part, : len(own)] = group.positions
            words[:, chunk, part] = group.masks
    first_tile = (request.context + request.chain) // TILE
    return [
        first_tile, built.append(begins), built.append(slots), built.append(words.reshape(-1).view(np.int32)),
        2 * begins[-1],
    ]  # fmt: skip
