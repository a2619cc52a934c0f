"""How a pass's attention is cut into programs, and what a captured graph fixes of that. No choice here changes a bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.verifier.attention.calls import TILE, Call
from services.verifier.kernels.triton.pass_meta import BLOCK_INTS, SEGMENT, WORK_INTS, work_at
from services.verifier.model.target_port import Rows, contexts_of
from services.verifier.model.tree_rows import sizes_of

# Rows of a block times query heads per key-value head: a matrix unit's least, and what prompts and large trees get.
NARROW, WIDE = 16, 64
# Lanes of a value from which on four warps have no room for a wide block's sums of all segments beside those of one.
_MANY_LANES = 128
# Most bytes of the sums of segments that are computed apart. Passes that need more loop over their segments.
MOST_SUMS_BYTES = 1 << 30
# An H100's multiprocessors, where there is no GPU to ask; and how many programs one of them runs at a time, at least.
_UNITS, _PROGRAMS_OF_UNIT = 132, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuAttentionSizes:
    """What matters of a model's attention calls.

    Attributes:
        share: most query heads per key-value head.
        programs: how many of one key-value head a GPU runs at a time.
        parts: most segments, counted for each row, whose sums are kept apart.
    """

    share: int
    programs: int
    parts: int

    @classmethod
    def of(cls, calls: Sequence[Call], device: torch.device) -> GpuAttentionSizes:
        """Of calls that a device computes; of a model without attention, there are none."""
        return cls(
            share=max((call.share for call in calls), default=1),
            programs=programs_at_once(device, min((call.kv_heads for call in calls), default=1)),
            parts=max(1, MOST_SUMS_BYTES // (4 * max(map(summed, calls), default=1))),
        )


def programs_at_once(device: torch.device, kv_heads: int) -> int:
    """Programs of one of so many key-value heads that a GPU runs at a time."""
    return -(-_PROGRAMS_OF_UNIT * _units_of(device) // kv_heads)


@functools.cache
def _units_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _UNITS


def warps_of(lanes: int, value_lanes: int, *, split: bool) -> int:
    """Warps of a program of attention.

    Args:
        lanes: of its block, rows times heads.
        split: whether it computes a segment alone.
    """
    return 8 if lanes >= WIDE and value_lanes >= _MANY_LANES and not split else 4


def summed(call: Call) -> int:
    """Numbers that are kept of a row's segment: of each head its maximum, its sum of weights, and its weighted sum."""
    return call.heads * (call.value_size + 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRoom:
    """How much a captured pass may hold: segments that are computed apart, counted for each row, and tiles of requests."""

    parts: int
    tiles: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassShape:
    """What a captured graph fixes of a pass; those with equal ones are alike.

    Attributes:
        rows: padding included.
        block_rows: most rows of a request that read keys and values together.
        split: whether the segments of a block are computed by programs of their own.
        parts: if ``split``, for how many segments, counted for each row, there is room; else 0.
        tiles: for how many tiles of all requests there is room.
    """

    rows: int
    block_rows: int
    split: bool
    parts: int = field(compare=False)
    tiles: int = field(compare=False)

    @classmethod
    def of(cls, batch: Sequence[Rows], sizes: GpuAttentionSizes, rows: int, narrow: int = NARROW) -> PassShape:
        """The shape of a pass over ``batch``.

        Segments are computed apart where the longest request would keep programs waiting that have nothing left to do.

        Args:
            narrow: rows times heads of the blocks of few rows; ``WIDE``: all blocks are alike.
        """
        counts = sizes_of(batch)
        most = max(counts, default=1)
        size = narrow if most * sizes.share <= narrow else WIDE
        block_rows = max(1, size // sizes.share)
        longest, work, parts, tiles, padding = 1, 0, 0, 1, rows
        for context, count in zip(contexts_of(batch), counts, strict=True):
            end = context + count
            segments = (end - 1) // SEGMENT + 1
            longest = max(longest, segments)
            work += -(-count // block_rows) * segments
            parts += count * segments
            tiles += (end - 1) // TILE + 1
            padding -= count
        parts += padding
        split = longest > 1 and parts <= sizes.parts and work < longest * sizes.programs
        return cls(rows=rows, block_rows=block_rows, split=split, parts=parts if split else 0, tiles=tiles)

    def within(self, room: PassRoom) -> bool:
        """Whether a pass with so much room holds it."""
        return self.parts <= room.parts and self.tiles <= room.tiles

    def ints(self) -> int:
        """How many ints describe any pass of the shape, at most.

        A request with a tree has at most two chunks per row, and at most 129 rows that may need words in each of them.
        """
        of_rows = 8 + BLOCK_INTS + 2 * (2 * TILE) + 2 * 80
        return work_at(self.rows) + WORK_INTS + self.tiles + 2 * self.parts + self.rows * of_rows
