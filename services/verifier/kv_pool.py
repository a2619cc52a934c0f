"""Keys and values of all live requests, in blocks of one pool."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch


class KVPool:
    """Rows for every layer's keys and values.

    ``keys`` is [layers, key-value heads, rows, head size]; ``values`` is one wider, its last column always 1, so that one
    product with the attention weights gives their weighted sum and their plain sum. A request owns whole blocks of
    ``block_size`` rows; they lie side by side where the pool has such a run, so that its context can be read as a view.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_size: int,
        rows: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.total_blocks = -(-rows // block_size)
        self.device = device
        # One row more than the blocks hold takes what padding rows write; no request ever reads it.
        self.padding_row = self.total_blocks * block_size
        self.keys = torch.zeros(layers, heads, self.padding_row + 1, head_size, dtype=dtype, device=device)
        self.values = torch.zeros(layers, heads, self.padding_row + 1, head_size + 1, dtype=dtype, device=device)
        self.values[..., -1] = 1
        self._free = list(range(self.total_blocks))
        self._rows: dict[str, torch.Tensor] = {}
        self._blocks: dict[str, list[int]] = {}
        self._contiguous: dict[str, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def allocate(self, owner: str, rows: int) -> bool:
        """Give ``owner`` room for ``rows`` rows; False if there is not enough.

        Raises:
            ValueError: it has room already.
        """
        if owner in self._blocks:
            raise ValueError(f"{owner} holds rows already")
        count = -(-rows // self.block_size)
        if count > len(self._free):
            return False
        blocks = self._take_run(count)
        self._blocks[owner] = blocks
        starts = torch.tensor(blocks, device=self.device)[:, None] * self.block_size
        self._rows[owner] = (starts + torch.arange(self.block_size, device=self.device)).flatten()
        if blocks == list(range(blocks[0], blocks[0] + count)):
            self._contiguous[owner] = blocks[0] * self.block_size
        # Rows that are not written yet are read with weight zero, and zero times what an overflow left behind is not zero.
        self.values[:, :, self._rows[owner], :-1] = 0
        return True

    def _take_run(self, count: int) -> list[int]:
        """``count`` free blocks: the first run of neighbours, or else the lowest ones."""
        free = self._free
        start = next((i for i in range(len(free) - count + 1) if free[i + count - 1] - free[i] == count - 1), 0)
        taken = free[start : start + count]
        del free[start : start + count]
        return taken

    def release(self, owner: str) -> None:
        """Take back what ``owner`` holds; nothing if it holds nothing."""
        self._free = list(heapq.merge(self._free, self._blocks.pop(owner, [])))
        self._rows.pop(owner, None)
        self._contiguous.pop(owner, None)

    def rows_of(self, owner: str) -> torch.Tensor:
        """Pool rows of all of ``owner``'s positions, in order."""
        return self._rows[owner]

    def window(self, owner: str, start: int, stop: int) -> slice | torch.Tensor:
        """Index of ``owner``'s positions from ``start`` to ``stop``: a slice where they are neighbours."""
        first = self._contiguous.get(owner)
        return self._rows[owner][start:stop] if first is None else slice(first + start, first + stop)

    def move(self, owner: str, sources: Sequence[int], start: int) -> None:
        """Copy the rows at ``sources`` (ascending) to ``start``, ``start + 1``, ... in every layer."""
        offset = next((i for i, source in enumerate(sources) if source != start + i), len(sources))
        if offset == len(sources):
            return
        rows = self._rows[owner]
        source_rows = rows[torch.tensor(sources[offset:], device=rows.device)]
        target_rows = rows[start + offset : start + len(sources)]
        self.keys[:, :, target_rows] = self.keys[:, :, source_rows]
        self.values[:, :, target_rows] = self.values[:, :, source_rows]
