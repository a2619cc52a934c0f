"""Tree attention by torch's matrix products over stacked tiles, on any device (see ``tiled_layout``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.verifier.attention.calls import TILE, Bias, Call
from services.verifier.attention.tiled_layout import Bucket, Heads, Index, Layout, lay_out
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows

# Matrix products with fewer rows use other kernels, with other rounding.
_ROW_MULTIPLE = 8


class TiledPass:
    """Implements ``Pass`` by stacked tiles; see ``tiled_layout.lay_out`` for the arguments."""

    def __init__(self, pool: KVPool, batch: Sequence[Rows], padding: int, stream_rows: Sequence[int] | None = None) -> None:
        self._pool = pool
        self._layout: Layout = lay_out(pool, batch, padding, stream_rows)
        # Masks, which the first layer computes for all: by bucket, query heads per key-value head, window and chunk.
        self._masks: dict[tuple[int, int, int | None, int | None], torch.Tensor] = {}

    @property
    def positions(self) -> torch.Tensor:
        """[rows], int64: the position of each row in its request."""
        return self._layout.positions

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        keys, values = self._pool.keys[call.entry], self._pool.values[call.entry]
        keys[layout.blocks, :, :, layout.offsets] = key.transpose(0, 1)
        values[layout.blocks, :, layout.offsets, :-1] = value.transpose(0, 1)
        scaled = (query * call.scale).transpose(0, 1)
        results = []
        for number, bucket in enumerate(layout.buckets):
            kind = (number, call.share, call.window, call.chunk)
            mask = self._masks.get(kind)
            if mask is None:
                mask = self._masks[kind] = _hidden(bucket, call)
            results.append(_attend_bucket(call, bucket, mask, scaled, keys, values))
        output = torch.cat(results) if len(results) > 1 else results[0]
        return output.index_select(0, layout.source)


def _attend_bucket(
    call: Call, bucket: Bucket, hidden: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of one bucket: heads and windows are computed apart, under one maximum, and summed tile by tile.

    Args:
        hidden: see ``_hidden``.
        query: [rows of the pass, heads, key size], scaled.
        keys: [blocks, key-value heads, key size, TILE].
        values: [blocks, key-value heads, TILE, value size + 1].

    Returns:
        [groups * rows, heads, value size], float32.
    """
    kv_heads, share = call.kv_heads, call.share
    groups, rows = bucket.rows.shape
    # Queries that share keys are neighbours: [groups, kv heads, rows * share, size].
    grouped = query.index_select(0, bucket.rows.flatten()).view(groups, rows, kv_heads, share, call.key_size).transpose(1, 2)
    grouped = _pad_rows(grouped.reshape(groups, kv_heads, rows * share, call.key_size))
    scores = call.capped(_product(grouped, _window(keys, bucket, groups, dim=3)))
    if call.bias is not None:
        scores = scores + _bias(call, call.bias, bucket.positions, bucket.slot_positions)
    scores = scores.masked_fill(hidden[0] if len(hidden) == 1 else hidden.all(0), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    sinks = None if call.sinks is None else _sinks(call, rows)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    total = torch.zeros(groups, kv_heads, grouped.shape[2], values.shape[-1], dtype=torch.float32, device=keys.device)
    if bucket.heads is not None:
        head_scores = _scores_of_heads(call, bucket, bucket.heads, grouped, keys)
        best = head_scores.amax(-1, keepdim=True)
        for of, pairs in bucket.heads.steps:
            top[of] = torch.maximum(top[of], _take(best, pairs))
        weights = (head_scores - top.index_select(0, bucket.heads.groups)).exp().to(keys.dtype)
        sums = _head_values(bucket.heads, weights, values)
        for of, pairs in bucket.heads.steps:
            total[of] += _take(sums, pairs)
    weights = (scores - top).exp().to(keys.dtype)
    window_values = _window(values, bucket, groups, dim=2)
    # A single segment is the mask of the scores already.
    for unseen in hidden if len(hidden) > 1 else (None,):
        seen = weights if unseen is None else weights.masked_fill(unseen, 0)
        total += _product(seen, window_values)
    if sinks is not None:
        total[..., -1:] += (sinks - top).exp()
    total = total[:, :, : rows * share]
    output = (total[..., :-1] / total[..., -1:]).view(groups, kv_heads, rows, share, call.value_size)
    return output.transpose(1, 2).reshape(groups * rows, kv_heads * share, call.value_size)


def _scores_of_heads(call: Call, bucket: Bucket, heads: Heads, grouped: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[pairs, kv heads, rows, TILE], -inf at positions too far back for a row."""
    scores = call.capped(_head_scores(heads, grouped, keys))
    slots = heads.first_positions[:, None] + torch.arange(TILE, device=keys.device)
    positions = bucket.positions[heads.groups]
    if call.bias is not None:
        scores = scores + _bias(call, call.bias, positions, slots)
    rows = functional.pad(
        positions.repeat_interleave(call.share, dim=1), (0, grouped.shape[2] - call.share * positions.shape[1])
    )
    unseen = call.unseen(rows[:, :, None], slots[:, None])
    return scores if unseen is None else scores.masked_fill(unseen[:, None], float("-inf"))


def _bias(call: Call, bias: Bias, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[groups, kv heads, padded rows * share, slots], from the positions [groups, rows] and [groups, slots]."""
    found = bias.of(rows[:, :, None], slots[:, None])
    found = found.view(call.kv_heads, call.share, *found.shape[1:])
    # [kv heads, share, groups, rows, slots] to [groups, kv heads, rows, share, slots].
    return _pad_rows(found.permute(2, 0, 3, 1, 4).flatten(2, 3))


def _sinks(call: Call, rows: int) -> torch.Tensor:
    """[1, kv heads, padded rows * share, 1]."""
    assert call.sinks is not None
    return _pad_rows(call.sinks.view(1, call.kv_heads, 1, call.share, 1).expand(-1, -1, rows, -1, -1).flatten(2, 3))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n, kv heads, rows, a] x [n, kv heads, a, b], in float32."""
    count, kv_heads = left.shape[:2]
    flat = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return flat.view(count, kv_heads, *flat.shape[1:]).float()


def _window(pool: torch.Tensor, bucket: Bucket, groups: int, dim: int) -> torch.Tensor:
    """The windows' keys (slots in ``dim`` 3) or values (in ``dim`` 2): [groups, kv heads, ...]."""
    blocks = _take(pool, bucket.window)
    if blocks.shape[0] == groups:
        return blocks
    by_tile = blocks.view(groups, -1, *blocks.shape[1:]).unbind(1)
    return torch.cat(by_tile, dim=dim)


def _head_scores(heads: Heads, grouped: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[pairs, kv heads, rows, TILE]."""
    parts = [_product(_take(grouped, groups), _take(keys, blocks)) for groups, blocks in heads.chunks]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _head_values(heads: Heads, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[pairs, kv heads, rows, size + 1]."""
    parts, done = [], 0
    for _, blocks in heads.chunks:
        chunk = _take(values, blocks)
        parts.append(_product(weights[done : done + len(chunk)], chunk))
        done += len(chunk)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _hidden(bucket: Bucket, call: Call) -> torch.Tensor:
    """[segments, groups, 1, padded rows * share, slots]: true where a query does not see a slot; padding sees as row 0."""
    segments = bucket.segments
    unseen = call.unseen(bucket.positions[:, :, None], bucket.slot_positions[:, None])
    if unseen is not None:
        # Padding rows keep slot 0 in sight: their position is 0, so that slot's is never too far back.
        segments = segments & ~unseen
    segments = segments.repeat_interleave(call.share, dim=2)
    padding = _padded(segments.shape[2]) - segments.shape[2]
    return ~torch.cat([segments, segments[:, :, :1].expand(-1, -1, padding, -1)], dim=2)[:, :, None]


def _take(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    """Entries of the first dimension, as a view or by ``index_select``, which copies whole entries; indexing does not."""
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)


def _pad_rows(matrices: torch.Tensor) -> torch.Tensor:
    return functional.pad(matrices, (0, 0, 0, _padded(matrices.shape[2]) - matrices.shape[2]))


def _padded(rows: int) -> int:
    return rows + -rows % _ROW_MULTIPLE
