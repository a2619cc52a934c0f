"""Tree attention over the pool, plugged into transformers' attention interface.

A pass lays the rows of all requests side by side in one sequence of batch size one. The model hands each layer's queries,
keys and values to ``attend``, which stores the new keys and values in the pool and lets every row see what ``layout`` says.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from services.verifier.layout import TILE, Group, Pass

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
    pool, slots = outrider_pass.pool, outrider_pass.slots
    keys, values = pool.keys[layer], pool.values[layer]
    keys[:, slots] = key[0]
    values[:, slots, :-1] = value[0]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = torch.zeros_like(query[0])
    for group in outrider_pass.groups:
        output[:, group.rows] = _attend_group(group, query[0, :, group.rows] * scale, keys, values, sliding_window)
    return output.transpose(0, 1)[None], None


def _attend_group(
    group: Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attention of one group: head and tail apart, joined under one maximum.

    Args:
        query: [heads, rows, size], scaled.
        keys: [key-value heads, pool rows, size]; ``values`` one wider.

    Returns:
        [heads, rows, size].
    """
    heads, rows, size = query.shape
    kv_heads = keys.shape[0]
    grouped = query.view(kv_heads, heads // kv_heads, rows, size)
    tail_scores = _tail_scores(group, grouped, keys).masked_fill(~_seen_in_tail(group, window), float("-inf"))
    top = tail_scores.amax(-1, keepdim=True)
    if group.head is None:
        total = _tail_values(group, (tail_scores - top).exp().to(query.dtype), values)
    else:
        head_scores = _product(grouped, keys[:, group.head].transpose(1, 2))
        if window is not None:
            head_scores = head_scores.masked_fill(~_seen_in_head(group, head_scores.shape[-1], window), float("-inf"))
        top = torch.maximum(top, head_scores.amax(-1, keepdim=True))
        total = _product((head_scores - top).exp().to(query.dtype), values[:, group.head])
        total = total + _tail_values(group, (tail_scores - top).exp().to(query.dtype), values)
    return (total[..., :-1] / total[..., -1:]).reshape(heads, rows, size).to(query.dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[kv heads, group, rows, n] x [kv heads, n, m], with as many rows as the kernels need."""
    kv_heads, group, rows, _ = left.shape
    flat = _pad_rows(left.reshape(kv_heads, group * rows, -1))
    return torch.bmm(flat, right)[:, : group * rows].view(kv_heads, group, rows, -1).float()


def _tail_scores(group: Group, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[kv heads, group, rows, TILE]."""
    tail = keys[:, group.tail]
    if tail.dim() == 3:
        return _product(query, tail.transpose(1, 2))
    return _row_product(query, tail.transpose(2, 3))


def _tail_values(group: Group, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[kv heads, group, rows, size + 1]."""
    tail = values[:, group.tail]
    return _product(weights, tail) if tail.dim() == 3 else _row_product(weights, tail)


def _row_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[kv heads, group, rows, n] x [kv heads, rows, n, m]: every row has its own right side."""
    kv_heads, group, rows, n = left.shape
    flat = _pad_rows(left.transpose(1, 2).reshape(kv_heads * rows, group, n))
    product = torch.bmm(flat, right.reshape(kv_heads * rows, n, -1))[:, :group]
    return product.view(kv_heads, rows, group, -1).transpose(1, 2).float()


def _pad_rows(matrices: torch.Tensor) -> torch.Tensor:
    return functional.pad(matrices, (0, 0, 0, -matrices.shape[1] % _ROW_MULTIPLE))


def _seen_in_tail(group: Group, window: int | None) -> torch.Tensor:
    if window is None:
        return group.visible
    tail = torch.arange(TILE, device=group.positions.device)
    return group.visible & (group.positions[:, None] % TILE - tail < window)


def _seen_in_head(group: Group, length: int, window: int) -> torch.Tensor:
    return group.positions[:, None] - torch.arange(length, device=group.positions.device) < window


def register() -> None:
    """Make ``attn_implementation="outrider"`` known to transformers."""
    AttentionInterface.register(NAME, attend)
