"""Keys and values of all live requests, in blocks of one pool."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch


class KVPool:
    """Rows for every layer's keys and values.

    ``data`` is [layers, 2, key-value heads, rows, head size]. A request owns whole blocks of ``block_size`` rows; they lie
    side by side where the pool has such a run, so that its context can be read as a view.
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
        self.total_blocks = rows // block_size
        # The last row takes what padding rows write; no request ever reads it.
        self.padding_row = self.total_blocks * block_size
        self.data = torch.zeros(layers, 2, heads, self.padding_row + 1, head_size, dtype=dtype, device=device)
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
        starts = torch.tensor(blocks, device=self.data.device)[:, None] * self.block_size
        self._rows[owner] = (starts + torch.arange(self.block_size, device=self.data.device)).flatten()
        if blocks == list(range(blocks[0], blocks[0] + count)):
            self._contiguous[owner] = blocks[0] * self.block_size
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

    def rows_of(self, owner: str, start: int, count: int) -> torch.Tensor:
        """Pool rows of ``owner``'s positions ``start`` to ``start + count``, [count]."""
        return self._rows[owner][start : start + count]

    def window(self, owner: str, length: int) -> slice | torch.Tensor:
        """Index of the first ``length`` rows of ``owner``: a slice where they are neighbours."""
        start = self._contiguous.get(owner)
        return self._rows[owner][:length] if start is None else slice(start, start + length)

    def move(self, owner: str, sources: Sequence[int], start: int) -> None:
        """Copy the rows at ``sources`` (ascending) to ``start``, ``start + 1``, ... in every layer."""
        offset = next((i for i, source in enumerate(sources) if source != start + i), len(sources))
        if offset == len(sources):
            return
        rows = self._rows[owner]
        source_rows = rows[torch.tensor(sources[offset:], device=rows.device)]
        target_rows = rows[start + offset : start + len(sources)]
        self.data[:, :, :, target_rows] = self.data[:, :, :, source_rows]
