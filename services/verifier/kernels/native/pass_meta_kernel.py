"""Describes a pass for the kernels of a GPU by compiled code; see pass_meta.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from services.verifier.attention.calls import TILE
from services.verifier.kernels.native.library import Library
from services.verifier.model.target_port import Rows, SingleRows, contexts_of
from services.verifier.model.tree_rows import TreeRows
from speculation.arrays import array_of

# Numbers that suffice for most passes, by row; where they do not, more are tried once.
_ROOM_PER_ROW, _MOST_PER_ROW = 256, 4096
_SEGMENT = 8 * TILE


class PassMetaKernel:
    """Describes with the compiled code, into memory that the next call uses again."""

    def __init__(self, library: Library) -> None:
        self._describe = library.functions.outrider_describe
        self._describe.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            *[ctypes.c_int64] * 3,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        self._describe.restype = ctypes.c_int64
        self._numbers = np.empty(0, dtype=np.int32)

    def describe(
        self,
        batch: Sequence[Rows],
        tables: NDArray[np.int64],
        padding_block: int,
        rows: int,
        block_rows: int,
        split: bool,
    ) -> NDArray[np.int32] | None:
        """The numbers of ``pass_meta.describe``, valid until the next call.

        Args:
            tables: [requests, 2]: where each one's KV blocks lie, by position, as int32, and how many they are.

        Returns:
            None where a tree has more than 128 nodes, or its copies are too many: the reference can do that.

        Raises:
            IndexError: a request does not own blocks for its rows.
        """
        contexts = contexts_of(batch)
        reached = sum(contexts) // TILE + 2 * len(batch)
        if split:
            # Two numbers for each segment of a block, of which there are no more than rows.
            reached += 2 * rows * ((max(contexts, default=0) + rows) // _SEGMENT + 1)
        for per_row in (_ROOM_PER_ROW, _MOST_PER_ROW):
            room = per_row * rows + reached
            if len(self._numbers) < room:
                self._numbers = np.empty(room, dtype=np.int32)
            count = self.describe_into(batch, tables, padding_block, rows, block_rows, split, self._numbers)
            if count is not None:
                return self._numbers[:count]
        return None

    def describe_into(
        self,
        batch: Sequence[Rows],
        tables: NDArray[np.int64],
        padding_block: int,
        rows: int,
        block_rows: int,
        split: bool,
        numbers: NDArray[np.int32],
    ) -> int | None:
        """As ``describe``, into ``numbers``; returns how many they are, None also where they are more than fit."""
        # As in ``struct pass_entry``.
        entries = np.empty((len(batch), 5), dtype=np.int64)
        entries[:, :2], entries[:, 2], entries[:, 3], entries[:, 4] = tables, contexts_of(batch), 1, 0
        parents = array("i")
        if isinstance(batch, TreeRows):
            entries[:, 4] = batch.counts
            parents = array_of("i", batch.parents)
        elif not isinstance(batch, SingleRows):
            entries[:, 3], entries[:, 4] = [each.chain for each in batch], [len(each.parents) for each in batch]
            parents.extend(chain.from_iterable([each.parents for each in batch]))
        count: int = self._describe(
            entries.ctypes.data, len(batch), parents.buffer_info()[0], rows, block_rows, split, padding_block,
            numbers.ctypes.data, len(numbers),
        )  # fmt: skip
        if count < -1:
            request, owned = batch[-2 - count], int(tables[-2 - count, 1])
            needed = request.context + len(request.tokens)
            raise IndexError(f"{request.request_id} owns {owned} blocks: not enough for {needed} rows")
        return count if count >= 0 else None
