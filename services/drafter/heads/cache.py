"""Keys and values of a session's rows in a drafter of hidden states, and attention over rows of many sessions at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.drafter.heads.layer import Attend

# Rows beyond the window that are kept until the cache is moved to its beginning: so it is moved rarely.
_SLACK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """Shape of the caches of a head.

    Attributes:
        window: committed rows that a row may attend to, itself included.
    """

    layers: int
    heads: int
    width: int
    window: int
    dtype: torch.dtype
    device: torch.device


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
        self.first = 0
        self.end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._rows.nbytes

    def begin(self, end: int) -> None:
        """Make ready for rows of committed positions before ``end``: drop rows that neither these nor later ones see."""
        window = self._shape.window
        if end - self.end >= window:
            self.first = self.end = max(0, end - window)
        elif self.end - self.first >= window + _SLACK:
            kept = self._rows[..., self.end - self.first - window : self.end - self.first, :].clone()
            self._rows[..., :window, :] = kept
            self.first = self.end - window

    def clear(self) -> None:
        """Let go of all rows, and of their memory."""
        self._rows = self._rows[..., :0, :].clone()
        self.first = self.end = 0

    def reserve(self, end: int, tree: int) -> None:
        """Have room for rows up to before position ``end``, and ``tree`` more behind them."""
        needed = end - self.first + tree
        if needed > self._rows.shape[3]:
            layers, two, heads, held, width = self._rows.shape
            larger = torch.empty(
                layers, two, heads, max(needed, 2 * held), width, dtype=self._rows.dtype, device=self._rows.device
            )
            larger[..., :held, :] = self._rows
            self._rows = larger

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [heads, capacity, width] each."""
        keys, values = self._rows[layer]
        return keys, values

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
    """

    cache: RowCache
    rows: int
    slots: slice | torch.Tensor
    low: int
    high: int
    mask: torch.Tensor | None

    def keep(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """Write a layer's keys and values, [key-value heads, rows, width] each."""
        keys, values = self.cache.of(layer)
        keys[:, self.slots], values[:, self.slots] = key, value


def attention(parts: Sequence[PassRows]) -> Attend:
    """The attention function of a forward pass over the rows of ``parts``, one after the other.

    It takes queries [1, heads, rows, width], keys and values [1, key heads, rows, width] after the rotation, and the layer.
    It keeps keys and values, and returns [1, heads, rows, width].
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        made = torch.empty_like(query)
        _, heads, _, width = query.shape
        groups = key.shape[1]
        begin = 0
        for part in parts:
            end = begin + part.rows
            part.keep(key[0, :, begin:end], value[0, :, begin:end], layer)
            keys, values = part.cache.of(layer)
            # Heads that share keys are rows of one product: keys are read once.
            asked = query[:, :, begin:end].reshape(1, groups, -1, width)
            mask = part.mask
            if mask is not None and heads != groups:
                mask = mask.repeat(heads // groups, 1)
            keys, values = keys[None, :, part.low : part.high], values[None, :, part.low : part.high]
            found = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=mask)
            made[:, :, begin:end] = found.reshape(1, heads, part.rows, width)
            begin = end
        return made

    return attend
