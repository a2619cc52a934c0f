"""Attention of a captured pass over a level of trees: over lanes of keys and values, one for each session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.drafter.heads.cache import CacheShape
from services.drafter.heads.layer import SeenRows


class Lanes:
    """Keys and values: of each session the committed rows that it sees, those of its tree, and one that padding writes.

    Args:
        held: the numbers, all of them finite: what nobody sees is multiplied all the same.
        count: of lanes.
        length: most committed rows.
        tree: most rows of a tree.
    """

    def __init__(self, held: torch.Tensor, shape: CacheShape, count: int, length: int, tree: int) -> None:
        self.count, self.length, self.tree_length = count, length, tree
        self.rows = held.view(shape.layers, 2, count, shape.heads, length + tree + 1, shape.width)

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def fill(self, lane: int, committed: torch.Tensor) -> None:
        """Have these rows in a lane, [layers, 2, heads, rows, width]."""
        self.rows[:, :, lane, :, : committed.shape[3]].copy_(committed)

    def tree(self, lane: int, rows: int) -> torch.Tensor:
        """[layers, 2, heads, rows, width], the first rows of a lane's tree."""
        return self.rows[:, :, lane, :, self.length : self.length + rows]


class LaneRows:
    """What a captured pass reads besides states and lanes: ``width`` rows of each lane, padding included.

    One copy fills all numbers, and one says who sees whom.

    Attributes:
        lanes: where keys and values are.
        tokens, positions: [lanes * width] int64.
    """

    def __init__(self, lanes: Lanes, width: int) -> None:
        self.lanes, self._width = lanes, width
        rows = lanes.count * width
        self._numbers = torch.zeros(3 * rows + lanes.count, dtype=torch.int64, device=lanes.device)
        self.tokens, self.positions = self._numbers[:rows], self._numbers[rows : 2 * rows]
        self._slots, self._ends = self._numbers[2 * rows : 3 * rows].view(lanes.count, width), self._numbers[3 * rows :]
        # Of the tree, and of the row that padding writes.
        self._seen = torch.zeros(lanes.count, width, lanes.tree_length + 1, dtype=torch.bool, device=lanes.device)
        self.lay_out(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), {}, [])

    def lay_out(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        seen: Mapping[int, NDArray[np.bool_]],
        committed: Sequence[int],
    ) -> torch.Tensor:
        """Lay out a pass, see ``LevelPasses.run``. Returns which rows are no padding, [nodes] int64, in their order."""
        count, width, length = self.lanes.count, self._width, self.lanes.length
        rows = count * width
        numbers = np.zeros(len(self._numbers), dtype=np.int64)
        slots, visible = numbers[2 * rows : 3 * rows].reshape(count, width), np.zeros(self._seen.shape, dtype=np.bool_)
        slots[:], visible[:, :, -1] = length + self.lanes.tree_length, True
        numbers[3 * rows : 3 * rows + len(committed)] = committed
        for lane, own in seen.items():
            new, held = own.shape
            slots[lane, :new] = length + held - new + np.arange(new)
            visible[lane, :new, :held], visible[lane, :new, -1] = own, False
        at = np.concatenate([lane * width + np.arange(len(own)) for lane, own in seen.items()] or [tokens])
        numbers[at], numbers[rows + at] = tokens, positions
        self._numbers.copy_(_sent(torch.from_numpy(numbers), self.lanes.device))
        self._seen.copy_(_sent(torch.from_numpy(visible), self.lanes.device))
        return _sent(torch.from_numpy(at), self.lanes.device)

    def try_out(self) -> None:
        """Lay out a pass without padding."""
        count, width = self.lanes.count, self._width
        own = np.eye(width, dtype=np.bool_)
        rows = np.arange(count * width)
        self.lay_out(rows % 7, rows % 5, dict.fromkeys(range(count), own), [self.lanes.length // 2] * count)

    def visible(self) -> torch.Tensor:
        """Bool [lanes, width, rows of a lane], which each row sees."""
        committed = torch.arange(self.lanes.length, device=self.lanes.device) < self._ends[:, None]
        return torch.cat((committed[:, None].expand(-1, self._width, -1), self._seen), dim=-1)

    def attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """Keep keys and values, and attend; queries, keys and values are [1, heads, rows, width]."""
        count, rows, width = self.lanes.count, self._width, query.shape[-1]
        keys, values = self.lanes.rows[layer]
        lane = torch.arange(count, device=self.lanes.device)[:, None]
        heads, groups = query.shape[1], key.shape[1]
        for held, new in ((keys, key), (values, value)):
            held[lane, :, self._slots] = new.reshape(groups, count, rows, width).permute(1, 2, 0, 3)
        share = heads // groups
        # Heads that share keys are rows of one product: keys are read once.
        asked = query.reshape(groups, share, count, rows, width).permute(2, 0, 1, 3, 4).flatten(2, 3)
        sees = mask[:, None, None].expand(-1, 1, share, -1, -1).flatten(2, 3)
        found = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=sees)
        of_heads = found.reshape(count, groups, share, rows, width).permute(1, 2, 0, 3, 4)
        return of_heads.reshape(1, heads, count * rows, width)


class LevelAttention:
    """Implements ``TextAttend`` for heads whose rows hand on keys and values alone.

    Args:
        mask: ``LaneRows.visible``.
    """

    def __init__(self, given: LaneRows, mask: torch.Tensor) -> None:
        self._given, self._mask = given, mask

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        return self._given.attended(query, key, value, layer, self._mask)

    @property
    def depths(self) -> torch.Tensor:
        raise NotImplementedError("its layers ask how deep rows are")

    def hand_on(self, states: torch.Tensor, number: int) -> None:
        raise NotImplementedError("its rows hand states on")

    def handed(self, number: int) -> torch.Tensor:
        raise NotImplementedError("its rows hand states on")

    def keep(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        raise NotImplementedError("its rows are looked at")

    @property
    def looking(self) -> torch.Tensor | None:
        raise NotImplementedError("its rows are looked at")

    def seen(self, layer: int, window: int | None = None) -> Sequence[SeenRows]:
        raise NotImplementedError("its rows are looked at")


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for what it does."""
    return (
        values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and values.numel() else values.to(device)
    )
