"""Tree attention over the pool, plugged into transformers' attention interface.

A pass lays the rows of all requests side by side in one sequence of batch size one. The model hands each layer's queries,
keys and values to ``attend``, which stores the new keys and values in the pool and lets every row see what ``layout`` says.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from services.verifier.kv_pool import TILE
from services.verifier.layout import Bucket, Heads, Index, Pass

NAME = "outrider"

# Matrix products with fewer rows take other kernels, with other rounding.
_ROW_MULTIPLE = 8


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    outrider_pass: Pass | None = None,
    **_hints: object,
) -> tuple[torch.Tensor, None]:
    """One layer's attention; the signature is transformers'.

    Args:
        query: [1, heads, rows, head size].
        key: [1, key-value heads, rows, head size]; ``value`` likewise.

    Returns:
        [1, rows, heads, head size].

    Raises:
        NotImplementedError: the architecture needs something of attention that this does not do.
    """
    if outrider_pass is None:
        raise NotImplementedError("it does not hand keyword arguments down to its attention layers")
    for name, given in (("softcap", softcap), ("s_aux", s_aux), ("position_bias", position_bias)):
        if given is not None:
            raise NotImplementedError(f"attention with {name} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    pool, tiles, offsets = outrider_pass.pool, outrider_pass.tiles, outrider_pass.offsets
    keys, values = pool.keys[layer], pool.values[layer]
    keys[tiles, :, offsets] = key[0].transpose(0, 1)
    values[tiles, :, offsets, :-1] = value[0].transpose(0, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scaled = (query[0] * scale).transpose(0, 1)
    results = []
    for number, bucket in enumerate(outrider_pass.buckets):
        mask = outrider_pass.masks.get((number, sliding_window))
        if mask is None:
            mask = _hidden(bucket, sliding_window, query.shape[1] // keys.shape[1])
            outrider_pass.masks[number, sliding_window] = mask
        results.append(_attend_bucket(bucket, mask, scaled, keys, values, sliding_window))
    output = torch.cat(results) if len(results) > 1 else results[0]
    return output.index_select(0, outrider_pass.source)[None].to(query.dtype), None


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
        keys: [tiles, key-value heads, TILE, size]; ``values`` one wider.

    Returns:
        [groups * rows, heads, size], float32.
    """
    kv_heads, size = keys.shape[1], keys.shape[-1]
    groups, rows = bucket.rows.shape
    share = query.shape[1] // kv_heads
    # Queries that share keys side by side: [groups, kv heads, rows * share, size].
    grouped = query.index_select(0, bucket.rows.flatten()).view(groups, rows, kv_heads, share, size).transpose(1, 2)
    grouped = _pad_rows(grouped.reshape(groups, kv_heads, rows * share, size))
    scores = _product(grouped, _window(keys, bucket, groups).transpose(2, 3))
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
    window_values = _window(values, bucket, groups)
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


def _window(pool: torch.Tensor, bucket: Bucket, groups: int) -> torch.Tensor:
    """[groups, kv heads, slots, size]: the windows' keys or values."""
    _, kv_heads, tile, size = pool.shape
    tiles = _take(pool, bucket.window)
    count = tiles.shape[0] // groups
    if count == 1:
        return tiles
    return tiles.view(groups, count, kv_heads, tile, size).transpose(1, 2).reshape(groups, kv_heads, count * tile, size)


def _head_scores(heads: Heads, grouped: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[pairs, kv heads, rows, TILE]."""
    parts = [_product(_take(grouped, groups), _take(keys, tiles).transpose(2, 3)) for groups, tiles in heads.chunks]
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


def register() -> None:
    """Make ``attn_implementation="outrider"`` known to transformers."""
    AttentionInterface.register(NAME, attend)
