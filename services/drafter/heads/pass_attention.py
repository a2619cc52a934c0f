"""Attention of a pass over rows of many sessions at once, and what these rows hand to those behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from services.drafter.heads.cache import PassRows
from services.drafter.heads.layer import SeenRows


class PassAttention:
    """Over the rows of ``parts``, one after the other. Implements ``TextAttend``."""

    def __init__(self, parts: Sequence[PassRows]) -> None:
        self._parts = parts

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """Keep keys and values, and attend; queries, keys and values are [1, heads, rows, width]."""
        made = torch.empty_like(query)
        _, heads, _, width = query.shape
        groups = key.shape[1]
        begin = 0
        for part in self._parts:
            end = begin + part.rows
            part.keep(key[0, :, begin:end], value[0, :, begin:end], layer)
            keys, values = part.cache.of(layer)
            # A layer that begins later than the others has no rows before.
            low = max(part.low, min(part.cache.begin_of(layer), part.high - 1))
            # Heads that share keys are rows of one product: keys are read once.
            asked = query[:, :, begin:end].reshape(1, groups, -1, width)
            mask = None if part.mask is None else part.mask[:, low - part.low :]
            if mask is not None and heads != groups:
                mask = mask.repeat(heads // groups, 1)
            keys, values = keys[None, :, low : part.high], values[None, :, low : part.high]
            found = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=mask)
            made[:, :, begin:end] = found.reshape(1, heads, part.rows, width)
            begin = end
        return made

    @property
    def depths(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([part.depths for part in self._parts]))

    def hand_on(self, states: torch.Tensor, number: int) -> None:
        for part, own in zip(self._parts, torch.split(states[0], [part.rows for part in self._parts]), strict=True):
            part.hand_on(own, number)

    def handed(self, number: int) -> torch.Tensor:
        return torch.cat([part.handed(number) for part in self._parts])[None]

    def keep(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        sizes = [part.rows for part in self._parts]
        for part, key, value in zip(self._parts, torch.split(keys[0], sizes), torch.split(values[0], sizes), strict=True):
            part.keep(key[None], value[None], layer)

    @property
    def looking(self) -> torch.Tensor | None:
        """Of rows of a text, the last one: drafts begin there."""
        if all(part.rows == part.looking for part in self._parts):
            return None
        ends = np.cumsum([part.rows for part in self._parts])
        return torch.from_numpy(
            np.concatenate([np.arange(end - part.looking, end) for part, end in zip(self._parts, ends, strict=True)])
        )

    def seen(self, layer: int, window: int | None = None) -> list[SeenRows]:
        return [part.seen(layer, window) for part in self._parts]
