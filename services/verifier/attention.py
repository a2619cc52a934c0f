"""Tree attention over the pool, plugged into transformers' attention interface.

A pass lays the rows of all requests side by side in one sequence of batch size one. The model hands each layer's queries,
keys and values to ``attend``, which stores the new keys and values in the pool and lets every row see its own request's
context, the chain before it and its own ancestors: nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from services.verifier.kv_pool import KVPool
from speculation.ports import Rows
from speculation.tree import ancestor_mask, depths
from speculation.types import TokenTree

NAME = "outrider"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One request's rows within a pass.

    Attributes:
        rows: where they lie in the pass.
        window: index of the request's context and new rows in the pool.
        visible: [rows, context + rows], which row sees which.
        distance: [rows, context + rows], how many positions back each seen one lies (for sliding windows).
    """

    rows: slice
    window: slice | torch.Tensor
    visible: torch.Tensor
    distance: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one forward pass needs besides its token ids.

    Attributes:
        positions: [rows], of each row in its own request.
        slots: [rows], where in the pool each row's key and value go.
    """

    pool: KVPool
    positions: torch.Tensor
    slots: torch.Tensor
    segments: tuple[Segment, ...]


def lay_out(pool: KVPool, batch: list[Rows], padding: int) -> Pass:
    """Positions, pool rows and masks of ``batch``, followed by ``padding`` rows that belong to nobody."""
    positions: list[int] = []
    slots: list[torch.Tensor] = []
    segments: list[Segment] = []
    for rows in batch:
        segment, row_positions = _segment(pool, rows, len(positions))
        segments.append(segment)
        slots.append(pool.rows_of(rows.session_id, rows.context, len(rows.tokens)))
        positions += row_positions
    device = pool.data.device
    slots.append(torch.full((padding,), pool.padding_row, dtype=torch.long, device=device))
    return Pass(
        pool=pool,
        positions=torch.tensor(positions + [0] * padding, device=device),
        slots=torch.cat(slots),
        segments=tuple(segments),
    )


def _segment(pool: KVPool, rows: Rows, start: int) -> tuple[Segment, list[int]]:
    count, chain, context = len(rows.tokens), rows.chain, rows.context
    visible = torch.ones(count, context + count, dtype=torch.bool)
    visible[:chain, context:] = torch.ones(chain, count, dtype=torch.bool).tril()
    positions = list(range(context, context + chain))
    if rows.parents:
        visible[chain:, context + chain :] = torch.from_numpy(ancestor_mask(rows.parents))
        nodes = TokenTree(tokens=rows.tokens[chain:], parents=rows.parents)
        positions += [context + chain - 1 + depth for depth in depths(nodes)]
    row_positions = torch.tensor(positions)
    seen = torch.cat([torch.arange(context), row_positions])
    device = pool.data.device
    segment = Segment(
        rows=slice(start, start + count),
        window=pool.window(rows.session_id, context + count),
        visible=visible.to(device),
        distance=(row_positions[:, None] - seen[None, :]).to(device),
    )
    return segment, positions


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
    outrider_pass: Pass | None = None,
    **unsupported: object,
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
        raise NotImplementedError("this model does not hand keyword arguments down to its attention layers")
    refused = sorted(name for name, given in unsupported.items() if name in ("s_aux", "position_bias") and given is not None)
    if refused or softcap is not None:
        raise NotImplementedError(f"attention with {', '.join(refused) or 'softcap'} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = outrider_pass.pool.data[layer]
    keys[:, outrider_pass.slots] = key[0]
    values[:, outrider_pass.slots] = value[0]
    output = torch.zeros_like(query[0])
    for segment in outrider_pass.segments:
        visible = segment.visible
        if sliding_window is not None:
            visible = visible & (segment.distance < sliding_window)
        output[:, segment.rows] = _attend_segment(
            query[0, :, segment.rows], keys[:, segment.window], values[:, segment.window], visible, scaling
        )
    return output.transpose(0, 1)[None], None


def _attend_segment(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """[heads, rows, size] x [key-value heads, seen, size] -> [heads, rows, size]."""
    return functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=visible, scale=scaling, enable_gqa=True
    )[0]


def register() -> None:
    """Make ``attn_implementation="outrider"`` known to transformers."""
    AttentionInterface.register(NAME, attend)
