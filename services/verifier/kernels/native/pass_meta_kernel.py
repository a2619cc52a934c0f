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
from services.verifier.model.target_port import Rows

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
        self._address = self._numbers.ctypes.data

    def describe(
        self,
        batch: Sequence[Rows],
        tables: Sequence[array[int]],
        padding_block: int,
        rows: int,
        block_rows: int,
        split: bool,
    ) -> NDArray[np.int32] | None:
        """The numbers of ``pass_meta.describe``, valid until the next call.

        Args:
            tables: each request's KV blocks, by position, as int32.

        Returns:
            None where a tree has more than 128 nodes, or its copies are too many: the reference can do that.

        Raises:
            IndexError: a request does not own blocks for its rows.
        """
        entries = array("q", _entries(batch, tables))
        parents = array("i", chain.from_iterable([request.parents for request in batch]))
        contexts = [request.context for request in batch]
        reached = sum(contexts) // TILE + 2 * len(batch)
        if split:
            # Two numbers for each segment of a block, of which there are no more than rows.
            reached += 2 * rows * ((max(contexts, default=0) + rows) // _SEGMENT + 1)
        for per_row in (_ROOM_PER_ROW, _MOST_PER_ROW):
            room = per_row * rows + reached
            if len(self._numbers) < room:
                self._numbers = np.empty(room, dtype=np.int32)
                self._address = self._numbers.ctypes.data
            count = self._describe(
                entries.buffer_info()[0], len(batch), parents.buffer_info()[0], rows, block_rows, split, padding_block,
                self._address, len(self._numbers),
            )  # fmt: skip
            if count >= 0:
                return self._numbers[:count]
            if count < -1:
                request, owned = batch[-2 - count], len(tables[-2 - count])
                needed = request.context + len(request.tokens)
                raise IndexError(f"{request.request_id} owns {owned} blocks: not enough for {needed} rows")
        return None


def _entries(batch: Sequence[Rows], tables: Sequence[array[int]]) -> list[int]:
    """The numbers of each ``struct pass_entry``."""
    return [
        number
        for request, table in zip(batch, tables, strict=True)
        for number in (
            *table.buffer_info(),
            request.context,
            len(request.tokens) - len(request.parents),
            len(request.parents),
        )
    ]
