"""Describes a pass for the kernels of a GPU by compiled code; see pass_meta.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.verifier.attention.calls import TILE
from services.verifier.kernels.native.library import Library
from services.verifier.model.target_port import Rows

# Numbers that suffice for most passes, by row; where they do not, more are tried once.
_ROOM_PER_ROW, _MOST_PER_ROW = 256, 4096


class PassMetaKernel:
    """Describes with the compiled code, into memory that the next call uses again."""

    def __init__(self, library: Library) -> None:
        self._describe = library.functions.outrider_describe
        self._describe.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            *[ctypes.c_int64] * 2,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        self._describe.restype = ctypes.c_int64
        self._numbers = np.empty(0, dtype=np.int32)

    def describe(
        self, batch: Sequence[Rows], tables: Sequence[array[int]], padding_block: int, rows: int, block_rows: int
    ) -> NDArray[np.int32] | None:
        """The numbers of ``pass_meta.describe``, valid until the next call.

        Args:
            tables: each request's KV blocks, by position, as int32.

        Returns:
            None where a tree has more than 128 nodes, or its copies are too many: the reference can do that.
        """
        entries = array("q")
        parents = array("i")
        for request, table in zip(batch, tables, strict=True):
            nodes, count = len(request.parents), len(request.tokens)
            address, owned = table.buffer_info()
            if request.context + count > owned * TILE:
                raise IndexError(f"{request.request_id} owns {owned} blocks: not enough for {request.context + count} rows")
            entries.extend((address, request.context, count - nodes, nodes))
            if nodes:
                parents.extend(request.parents)
        reached = sum(request.context for request in batch) // TILE + 2 * len(batch)
        for per_row in (_ROOM_PER_ROW, _MOST_PER_ROW):
            room = per_row * rows + reached
            if len(self._numbers) < room:
                self._numbers = np.empty(room, dtype=np.int32)
            count = self._describe(
                entries.buffer_info()[0], len(batch), parents.buffer_info()[0], rows, block_rows, padding_block,
                self._numbers.ctypes.data, len(self._numbers),
            )  # fmt: skip
            if count >= 0:
                return self._numbers[:count]
        return None
