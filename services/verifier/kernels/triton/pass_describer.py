"""Describes passes by compiled code where that is there, else by the reference; see ``pass_meta``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.pass_meta_kernel import PassMetaKernel
from services.verifier.kernels.triton import virtual_groups
from services.verifier.kernels.triton.pass_meta import PassMeta, describe
from services.verifier.kernels.triton.virtual_groups import Pack, pack
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows, ids_of, tokens_of


class PassDescriber:
    """Describes passes over one pool, one at a time: a description is valid until the next one.

    Args:
        pack: puts the nodes of a tree into groups; compiled code knows the usual way alone.
    """

    def __init__(self, pool: KVPool, pack: Pack = pack) -> None:
        self._pool, self._pack = pool, pack
        found = library() if pack is virtual_groups.pack else None
        self._kernel = None if found is None else PassMetaKernel(found)

    def describe(self, batch: Sequence[Rows], rows: int, block_rows: int, split: bool) -> PassMeta:
        """As ``pass_meta.describe``, of the pool's blocks."""
        numbers = self._numbers(batch, rows, block_rows, split)
        if numbers is None:
            tables = [self._pool.blocks_of(request.request_id) for request in batch]
            return describe(batch, tables, self._pool.padding_block, rows, block_rows, split, self._pack)
        tokens = tokens_of(batch)
        return PassMeta(numbers=numbers, tokens=tokens + [0] * (rows - len(tokens)))

    def describe_into(
        self, batch: Sequence[Rows], rows: int, block_rows: int, split: bool, numbers: NDArray[np.int32]
    ) -> int:
        """The same, the description in ``numbers``; returns how many they are.

        Raises:
            ValueError: there is no room for so many.
        """
        if self._kernel is not None:
            tables = self._pool.tables_of(ids_of(batch))
            count = self._kernel.describe_into(batch, tables, self._pool.padding_block, rows, block_rows, split, numbers)
            if count is not None:
                return count
        made = self.describe(batch, rows, block_rows, split).numbers
        numbers[: len(made)] = made
        return len(made)

    def _numbers(self, batch: Sequence[Rows], rows: int, block_rows: int, split: bool) -> NDArray[np.int32] | None:
        if self._kernel is None:
            return None
        tables = self._pool.tables_of(ids_of(batch))
        return self._kernel.describe(batch, tables, self._pool.padding_block, rows, block_rows, split)
