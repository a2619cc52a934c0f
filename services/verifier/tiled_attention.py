"""Tree attention by torch's own matrix products, on any device: tiles of the pool, stacked (see ``tiled_layout``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.verifier.kv_pool import TILE, KVPool
from services.verifier.tiled_layout import Bucket, Heads, Index, Layout, lay_out
from speculation.ports import Rows

# Matrix products with fewer rows take other kernels, with other rounding.
_ROW_MULTIPLE = 8


class TiledPass:
    """What one forward pass needs besides its token ids; implements ``attention.Pass``."""

    def __init__(self, pool: KVPool, batch: Sequence[Rows], padding: int) -> None:
        self._pool = pool
        self._layout: Layout = lay_out(pool, batch, padding)
        # What the first layer has worked out for the others: masks, by bucket and sliding window.
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    @property
    def positions(self) -> torch.Tensor:
        """[rows], of each row in its own request."""
        return self._layout.positions

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """See ``attention.Pass``."""
        layout, own = self._layout, layer - self._pool.first_layer
        keys, values = self._pool.keys[own], self._pool.values[own]
        keys[layout.tiles, :, :, layout.offsets] = key.transpose(0, 1)
        values[layout.tiles, :, layout.offsets, :-1] = value.transpose(0, 1)
        scaled = (query * scale).transpose(0, 1)
        results = []
        for number, bucket in enumerate(layout.buckets):
            mask = self._masks.get((number, window))
            if mask is None:
                mask = self._masks[number, window] = _hidden(bucket, window, query.shape[0] // keys.shape[1])
            results.append(_attend_bucket(bucket, mask, scaled, keys, values, window))
        output = torch.cat(results) if len(results) > 1 else results[0]
        return output.index_select(0, layout.source)


def _attend_bucket(
    bucket: Bucket,
    hidden: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Attention of one bucket: heads and windows apart, under one maximum, summed tile by tile.

    Args:
        hidden: see ``_hidden``.
        query: [rows of the pass, heads, size], scaled.
        keys: [tiles, key-value heads, size, TILE].
        values: [tiles, key-value heads, TILE, size + 1].

    Returns:
        [groups * rows, heads, size], float32.
    """
    kv_heads, size = keys.shape[1:3]
    groups, rows = bucket.rows.shape
    share = query.shape[1] // kv_heads
    # Queries that share keys side by side: [groups, kv heads, rows * share, size].
    grouped = query.index_select(0, bucket.rows.flatten()).view(groups, rows, kv_heads, share, size).transpose(1, 2)
    grouped = _pad_rows(grouped.reshape(groups, kv_heads, rows * share, size))
    scores = _product(grouped, _window(keys, bucket, groups, dim=3))
    scores = scores.masked_fill(hidden[0] if len(hidden) == 1 else hidden.all(0), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    total = torch.zeros(groups, kv_heads, grouped.shape[2], size + 1, device=keys.device)
    if bucket.heads is not None:
        head_scores = _head_scores(bucket.heads, grouped, keys)
        if window is not None:
            head_scores = head_scores.masked_fill(~_seen_in_heads(bucket, window, share, grouped.shape[2]), float("-inf"))
        best = head_scores.amax(-1, keepdim=True)
        for of, pairs in bucket.heads.steps:
            top[of] = torch.maximum(top[of], _take(best, pairs))
        weights = (head_scores - top.index_select(0, bucket.heads.groups)).exp().to(keys.dtype)
        sums = _head_values(bucket.heads, weights, values)
        for of, pairs in bucket.heads.steps:
            total[of] += _take(sums, pairs)
    weights = (scores - top).exp().to(keys.dtype)
    window_values = _window(values, bucket, groups, dim=2)
    # A single segment is what the scores were masked with.
    for unseen in hidden if len(hidden) > 1 else (None,):
        seen = weights if unseen is None else weights.masked_fill(unseen, 0)
        total += _product(seen, window_values)
    total = total[:, :, : rows * share]
    output = (total[..., :-1] / total[..., -1:]).view(groups, kv_heads, rows, share, size)
    return output.transpose(1, 2).reshape(groups * rows, kv_heads * share, size)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n, kv heads, rows, a] x [n, kv heads, a, b], in float32."""
    count, kv_heads = left.shape[:2]
    flat = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return flat.view(count, kv_heads, *flat.shape[1:]).float()


def _window(pool: torch.Tensor, bucket: Bucket, groups: int, dim: int) -> torch.Tensor:
    """The windows' keys (slots in ``dim`` 3) or values (in ``dim`` 2): [groups, kv heads, ...]."""
    tiles = _take(pool, bucket.window)
    if tiles.shape[0] == groups:
        return tiles
    by_tile = tiles.view(groups, -1, *tiles.shape[1:]).unbind(1)
    return torch.cat(by_tile, dim=dim)


def _head_scores(heads: Heads, grouped: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[pairs, kv heads, rows, TILE]."""
    parts = [_product(_take(grouped, groups), _take(keys, tiles)) for groups, tiles in heads.chunks]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _head_values(heads: Heads, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[pairs, kv heads, rows, size + 1]."""
    parts, done = [], 0
    for _, tiles in heads.chunks:
        chunk = _take(values, tiles)
        parts.append(_product(weights[done : done + len(chunk)], chunk))
        done += len(chunk)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _hidden(bucket: Bucket, window: int | None, share: int) -> torch.Tensor:
    """[segments, groups, 1, padded rows * share, slots]: slots that a query does not see; padding sees what row 0 sees."""
    segments = bucket.segments
    if window is not None:
        distance = bucket.positions[:, :, None] - bucket.slot_positions[:, None]
        # A padding row must go on seeing something: its position is 0, and slot 0's never below it.
        segments = segments & (distance < window)
    segments = segments.repeat_interleave(share, dim=2)
    padding = -segments.shape[2] % _ROW_MULTIPLE
    return ~torch.cat([segments, segments[:, :, :1].expand(-1, -1, padding, -1)], dim=2)[:, :, None]


def _seen_in_heads(bucket: Bucket, window: int, share: int, padded: int) -> torch.Tensor:
    """[pairs, 1, rows * share, TILE]: what of the whole tiles lies in the sliding window."""
    assert bucket.heads is not None
    heads = bucket.heads
    slots = heads.first_positions[:, None] + torch.arange(TILE, device=heads.first_positions.device)
    rows = bucket.positions[heads.groups].repeat_interleave(share, dim=1)
    rows = functional.pad(rows, (0, padded - rows.shape[1]))
    return (rows[:, :, None] - slots[:, None] < window)[:, None]


def _take(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    """Entries of the first dimension: a view, or a copy that moves whole entries, which plain indexing does not."""
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _pad_rows(matrices: torch.Tensor) -> torch.Tensor:
    return functional.pad(matrices, (0, 0, 0, -matrices.shape[2] % _ROW_MULTIPLE))
