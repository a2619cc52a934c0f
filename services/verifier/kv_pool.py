"""Keys and values of all live requests, in tiles of one pool."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

# Positions per tile: what a request's memory is made of, and what attention sums up by.
TILE = 64


class KVPool:
    """Tiles for every layer's keys and values.

    ``keys`` is [layers, tiles, key-value heads, head size, TILE]: a query's scores of a whole tile come out side by side.
    ``values`` is [layers, tiles, key-value heads, TILE, head size + 1], its last column always 1, so that one product with
    the attention weights gives their weighted sum and their plain sum. Position p of a request lies in its
    tile number p // TILE; tiles lie side by side where the pool has such a run, so that they can be read as a view.
    """

    def __init__(
        self, *, layers: int, heads: int, head_size: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.total_tiles = -(-rows // TILE)
        self.device = device
        # One tile more than requests can own takes what padding rows write; nobody is shown what it holds.
        self.padding_tile = self.total_tiles
        shape = (layers, self.total_tiles + 1, heads)
        self.keys = torch.zeros(*shape, head_size, TILE, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, TILE, head_size + 1, dtype=dtype, device=device)
        self.values[..., -1] = 1
        self._free = list(range(self.total_tiles))
        self._tiles: dict[str, list[int]] = {}

    @property
    def free_tiles(self) -> int:
        """Tiles that nobody owns."""
        return len(self._free)

    def allocate(self, owner: str, rows: int) -> bool:
        """Give ``owner`` room for ``rows`` rows; False if there is not enough.

        Raises:
            ValueError: it has room already.
        """
        if owner in self._tiles:
            raise ValueError(f"{owner} holds rows already")
        count = -(-rows // TILE)
        if count > len(self._free):
            return False
        tiles = self._take_run(count)
        self._tiles[owner] = tiles
        # Rows that are not written yet are read with weight zero, and zero times what an overflow left behind is not zero.
        self.values[:, torch.tensor(tiles, device=self.device), :, :, :-1] = 0
        return True

    def _take_run(self, count: int) -> list[int]:
        """``count`` free tiles: the first run of neighbours, or else the lowest ones."""
        free = self._free
        start = next((i for i in range(len(free) - count + 1) if free[i + count - 1] - free[i] == count - 1), 0)
        taken = free[start : start + count]
        del free[start : start + count]
        return taken

    def release(self, owner: str) -> None:
        """Take back what ``owner`` holds; nothing if it holds nothing."""
        self._free = list(heapq.merge(self._free, self._tiles.pop(owner, [])))

    def tiles_of(self, owner: str) -> list[int]:
        """``owner``'s tiles, in the order of its positions."""
        return self._tiles[owner]

    def move(self, owner: str, sources: Sequence[int], start: int) -> None:
        """Copy the rows at ``sources`` (ascending) to ``start``, ``start + 1``, ... in every layer."""
        offset = next((i for i, source in enumerate(sources) if source != start + i), len(sources))
        if offset == len(sources):
            return
        from_tiles, from_offsets = self._places(owner, sources[offset:])
        to_tiles, to_offsets = self._places(owner, range(start + offset, start + len(sources)))
        self.keys[:, to_tiles, :, :, to_offsets] = self.keys[:, from_tiles, :, :, from_offsets]
        self.values[:, to_tiles, :, to_offsets] = self.values[:, from_tiles, :, from_offsets]

    def _places(self, owner: str, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = self._tiles[owner]
        return (
            torch.tensor([tiles[position // TILE] for position in positions], device=self.device),
            torch.tensor([position % TILE for position in positions], device=self.device),
        )
