"""Keys and values of a session's rows in a drafter of hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.heads.layer import SeenRows

# Rows beyond the window that are kept until the cache is moved to its beginning: so it is moved rarely.
_SLACK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Shape of the caches of a head.

    Attributes:
        window: committed rows that a row may attend to, itself included.
        begins: by layer, the position of its first row, if that is not 0.
        handed: how many states of ``handed_width`` numbers each row hands to the row behind it.
    """

    layers: int
    heads: int
    width: int
    window: int
    dtype: torch.dtype
    device: torch.device
    begins: tuple[int, ...] = ()
    handed: int = 0
    handed_width: int = 0


class RowCache:
    """Rows of committed positions, in order, and behind them the rows of the tree under way.

    Row ``i`` of the drafter belongs to position ``i`` of the text. The cache holds those from ``first`` to before ``end``,
    at most the last ``window`` and some more. Rows of a tree are overwritten by whatever is written next: to drop a tree,
    nothing need be done.

    Attributes:
        first: position of the first row held.
        end: position behind the last committed row held.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._rows = torch.empty(shape.layers, 2, shape.heads, 0, shape.width, dtype=shape.dtype, device=shape.device)
        self._handed = torch.empty(shape.handed, 0, shape.handed_width, dtype=shape.dtype, device=shape.device)
        self.first = 0
        self.end = 0

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def window(self) -> int:
        """As in ``CacheShape``."""
        return self._shape.window

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._rows.nbytes + self._handed.nbytes

    def begin(self, end: int) -> None:
        """Make ready for rows of committed positions before ``end``: drop rows that neither these nor later ones see."""
        window = self._shape.window
        if end - self.end >= window:
            self.first = self.end = max(0, end - window)
        elif self.end - self.first >= window + _SLACK:
            last = slice(self.end - self.first - window, self.end - self.first)
            for held in (self._rows, self._handed):
                held[..., :window, :] = held[..., last, :].clone()
            self.first = self.end - window

    def clear(self) -> None:
        """Let go of all rows, and of their memory."""
        self._rows, self._handed = self._rows[..., :0, :].clone(), self._handed[..., :0, :].clone()
        self.first = self.end = 0

    def reserve(self, end: int, tree: int) -> None:
        """Have room for rows up to before position ``end``, and ``tree`` more behind them."""
        needed = end - self.first + tree
        if needed > self._rows.shape[3]:
            capacity = max(needed, 2 * self._rows.shape[3])
            self._rows, self._handed = _larger(self._rows, capacity), _larger(self._handed, capacity)

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [heads, capacity, width] each."""
        keys, values = self._rows[layer]
        return keys, values

    def begin_of(self, layer: int) -> int:
        """The slot of the first row that a layer has."""
        begins = self._shape.begins
        return max(0, begins[layer] - self.first) if begins else 0

    def seen_by_trees(self) -> torch.Tensor:
        """[layers, 2, heads, rows, width], keys and values of the committed rows that rows of a tree see."""
        committed = self.end - self.first
        return self._rows[:, :, :, max(0, committed - self._shape.window) : committed]

    def tree_rows(self, count: int) -> torch.Tensor:
        """[layers, 2, heads, count, width], keys and values of the first rows of the tree under way."""
        committed = self.end - self.first
        return self._rows[:, :, :, committed : committed + count]

    def handed(self, number: int) -> torch.Tensor:
        """[capacity, width], the states of one kind that rows hand on."""
        return self._handed[number]

    def committed(self, positions: NDArray[np.int64]) -> PassRows:
        """The part of a forward pass that computes rows of committed positions, ascending.

        They are behind the rows held, or replace some of them.
        """
        slots = positions - self.first
        window = self._shape.window
        low, high = max(0, int(slots[0]) - window + 1), int(slots[-1]) + 1
        contiguous = high - int(slots[0]) == len(slots)
        mask = None
        if len(slots) > 1:
            seen = np.arange(low, high)
            hidden = (seen > slots[:, None]) | (seen <= slots[:, None] - window)
            mask = self._additive(hidden)
        at = slice(int(slots[0]), high) if contiguous else torch.from_numpy(slots).to(self._rows.device)
        return PassRows(cache=self, rows=len(slots), slots=at, low=low, high=high, mask=mask)

    def tree(self, ancestors: NDArray[np.bool_]) -> PassRows:
        """The part that computes the latest rows of the tree under way.

        Args:
            ancestors: [latest rows, all rows of the tree], which of them each one sees, itself included.
        """
        committed, (rows, count) = self.end - self.first, ancestors.shape
        low = max(0, committed - self._shape.window)
        hidden = np.zeros((rows, committed + count - low), dtype=np.bool_)
        np.logical_not(ancestors, out=hidden[:, committed - low :])
        first = committed + count - rows
        return PassRows(
            cache=self,
            rows=rows,
            slots=slice(first, first + rows),
            low=low,
            high=committed + count,
            mask=self._additive(hidden) if hidden.any() else None,
            ancestors=ancestors,
        )

    def block(self, rows: int, without: Sequence[int], *, causal: bool, window: int | None) -> PassRows:
        """The part that computes a block of rows behind the committed ones, at the next positions.

        Args:
            without: positions of committed rows that nobody sees.
            causal: whether a row sees those of the block before it and itself; otherwise it sees the whole block.
            window: a row sees others nearer than this many positions; None: all.
        """
        committed = self.end - self.first
        low = max(0, committed - self._shape.window)
        seen, own = np.arange(low, committed + rows), committed + np.arange(rows)[:, None]
        hidden = np.zeros((rows, len(seen)), dtype=np.bool_)
        hidden[:, [slot for position in without if (slot := position - self.first - low) >= 0]] = True
        if causal:
            hidden |= seen > own
        if window is not None:
            hidden |= np.abs(seen - own) >= window
        return PassRows(
            cache=self,
            rows=rows,
            slots=slice(committed, committed + rows),
            low=low,
            high=committed + rows,
            mask=self._additive(hidden) if hidden.any() else None,
        )

    def _additive(self, hidden: NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._rows.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), -torch.inf).to(self._rows.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRows:
    """One session's rows of a forward pass.

    Attributes:
        slots: where in the cache they are kept.
        low, high: the slots that they see among them; ``mask`` [rows, high - low] is added to the scores, None: they see
            all.
        ancestors: as for ``RowCache.tree``; None: they are no rows of a tree.
    """

    cache: RowCache
    rows: int
    slots: slice | torch.Tensor
    low: int
    high: int
    mask: torch.Tensor | None
    ancestors: NDArray[np.bool_] | None = None

    @property
    def depths(self) -> NDArray[np.int64]:
        """[rows], their depths in the tree; 0 for committed rows."""
        return np.zeros(self.rows, dtype=np.int64) if self.ancestors is None else self.ancestors.sum(axis=1)

    def keep(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Write a layer's keys and values, [key-value heads, rows, width] each."""
        keys, values = self.cache.of(layer)
        keys[:, self.slots], values[:, self.slots] = key, value

    def hand_on(self, states: torch.Tensor, number: int) -> None:
        """Write the states [rows, width] that they hand on."""
        self.cache.handed(number)[self.slots] = states

    def handed(self, number: int) -> torch.Tensor:
        """[rows, width], what the row before each one handed on; zeros where there is none."""
        before = self._before()
        found = self.cache.handed(number)[torch.from_numpy(before).clamp(min=0).to(self.cache.device)]
        return found.masked_fill(torch.from_numpy(before < 0).to(found.device)[:, None], 0.0)

    @property
    def looking(self) -> int:
        """How many of the rows matter, counted from the end; see ``TextAttend.looking``."""
        return 1 if self.ancestors is None else self.rows

    def seen(self, layer: int, window: int | None) -> SeenRows:
        """What the rows that matter see of a layer of one head, drafted ones left out; see ``TextAttend.seen``."""
        end = self.high if self.ancestors is None else self.high - self.ancestors.shape[1]
        most = self.cache.window if window is None else min(window, self.cache.window)
        keys, values = self.cache.of(layer)
        at = slice(max(0, end - most), end)
        return SeenRows(rows=self.looking, keys=keys[0, at], values=values[0, at])

    def _before(self) -> NDArray[np.int64]:
        """[rows], the slots of the rows before them; -1: none."""
        if self.ancestors is None:
            slots = self.slots
            own = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots.cpu().numpy()
            return own - 1
        # Rows of a tree lie behind their parents, and behind the committed rows.
        rows, count = self.ancestors.shape
        committed = self.high - count
        others = self.ancestors.copy()
        others[np.arange(rows), count - rows + np.arange(rows)] = False
        parents = np.where(others.any(axis=1), count - 1 - others[:, ::-1].argmax(axis=1), -1)
        slots_before: NDArray[np.int64] = committed + parents
        return slots_before


def _larger(held: torch.Tensor, capacity: int) -> torch.Tensor:
    """The same rows with room for ``capacity``; zeros, since what is masked is multiplied all the same."""
    *sizes, rows, width = held.shape
    larger = held.new_zeros(*sizes, capacity, width)
    larger[..., :rows, :] = held
    return larger
