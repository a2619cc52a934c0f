"""Keys and values of all live requests, in tiles of one pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Positions per tile: what a request's memory is made of, and what attention sums up by.
TILE = 64


class KVPool:
    """Tiles for the keys and values of every layer, or of some: those from ``first_layer`` on.

    ``keys`` is [layers, tiles, key-value heads, head size, TILE]: a query's scores of a whole tile come out side by side.
    ``values`` is [layers, tiles, key-value heads, TILE, head size + 1], its last column always 1, so that one product with
    the attention weights gives their weighted sum and their plain sum. Position p of a request lies in its
    tile number p // TILE; ``tiles.TileAllocator`` says which tile of the pool that is.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_size: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        first_layer: int = 0,
    ) -> None:
        self.first_layer = first_layer
        self.total_tiles = -(-rows // TILE)
        self.device = device
        # One tile more than requests can own takes what padding rows write; nobody is shown what it holds.
        self.padding_tile = self.total_tiles
        shape = (layers, self.total_tiles + 1, heads)
        self.keys = torch.zeros(*shape, head_size, TILE, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, TILE, head_size + 1, dtype=dtype, device=device)
        self.values[..., -1] = 1
        self._tiles: dict[str, list[int]] = {}
        self._unclean: list[int] = []

    def assign(self, owner: str, tiles: Sequence[int], fresh: int) -> None:
        """Let ``owner`` have ``tiles`` behind those that it has; the last ``fresh`` ones hold nothing of its own yet."""
        self._tiles.setdefault(owner, []).extend(tiles)
        self._unclean += tiles[len(tiles) - fresh :]

    def clean(self) -> None:
        """Wipe tiles that have got a new owner: rows that are not written yet are read with weight zero, and zero times what
        an overflow left behind is not zero."""
        if self._unclean:
            self.values[:, torch.tensor(self._unclean, device=self.device), :, :, :-1] = 0
            self._unclean = []

    def clear(self) -> None:
        """Nobody has a tile."""
        self._tiles.clear()
        self._unclean = []

    def forget(self, owner: str) -> None:
        """``owner`` has no tiles any more; nothing if it has none."""
        self._tiles.pop(owner, None)

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
