"""Tree attention for captured graphs: tensors at fixed addresses, for as many rows and blocks as a bucket has.

The blocks of all requests of the pass are gathered, and attended to under one mask. Torch's fused attention sums in an order
of its own: this is for half precision on a GPU where our Triton kernels do not take the model (``on_gpu``), and equal bits
are not promised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.verifier.attention.calls import Call
from services.verifier.attention.fixed import Largest, rounded_up, steps
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.model.target_port import Rows
from speculation.tree import ROOT

# Passes of more rows compute for longer than their launches take.
_MOST_ROWS = 256
# Passes over more blocks would need too much memory for their mask and gathered keys, which a graph keeps allocated.
_MOST_BLOCKS = 1024


class StaticBuckets:
    """Implements ``Buckets``: by rows, and by the blocks of all requests."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def bucket(self, batch: Sequence[Rows]) -> tuple[int, int] | None:
        rows = sum(len(request.tokens) for request in batch)
        blocks = sum((request.context + len(request.tokens) - 1) // BLOCK + 1 for request in batch)
        return (rounded_up(rows), rounded_up(blocks)) if rows <= _MOST_ROWS and blocks <= _MOST_BLOCKS else None

    def allowed(self, largest: Largest) -> list[tuple[int, int]]:
        blocks = min(_MOST_BLOCKS, largest.requests * -(-largest.positions // BLOCK))
        return [(rows, count) for rows in steps(min(_MOST_ROWS, largest.rows)) for count in steps(blocks)]

    def make(self, bucket: tuple[int, int]) -> StaticPass:
        return StaticPass(self._pool, *bucket)


class StaticPass:
    """Implements ``FixedPass`` for up to ``rows`` rows whose requests use up to ``blocks`` blocks in all.

    Attributes:
        tokens, positions: [rows], int64; set by ``fill``, like everything else.
    """

    def __init__(self, pool: KVPool, rows: int, blocks: int) -> None:
        device = pool.device
        self._pool = pool
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._own_block = torch.zeros(rows, dtype=torch.int64, device=device)
        self._own_offset = torch.zeros(rows, dtype=torch.int64, device=device)
        self._blocks = torch.zeros(blocks, dtype=torch.int64, device=device)
        self._slot_positions = torch.zeros(blocks * BLOCK, dtype=torch.int64, device=device)
        self._sees = torch.zeros(rows, blocks * BLOCK, dtype=torch.bool, device=device)

    def fill(self, batch: Sequence[Rows]) -> None:
        """Lay out ``batch``; the remaining rows are padding, and write to the padding block."""
        rows, blocks = len(self.tokens), len(self._blocks)
        padding = self._pool.padding_block
        tokens: list[int] = []
        positions: list[int] = []
        own: list[tuple[int, int]] = []
        gathered: list[int] = []
        sees = torch.zeros(rows, blocks * BLOCK, dtype=torch.bool)
        # Padding rows see slot 0, so that every row sees something.
        sees[:, 0] = True
        slot_positions = torch.zeros(blocks * BLOCK, dtype=torch.int64)
        for request in batch:
            begin, end = len(gathered) * BLOCK, request.context + request.chain
            count = request.context + len(request.tokens)
            owned = self._pool.blocks_of(request.request_id)[: (count - 1) // BLOCK + 1]
            gathered += owned
            slot_positions[begin : begin + end] = torch.arange(end)
            first = len(tokens)
            sees[first : first + len(request.tokens), 0] = False
            for index in range(len(request.tokens)):
                row, slot = first + index, request.context + index
                if index < request.chain:
                    positions.append(slot)
                    sees[row, begin : begin + slot + 1] = True
                else:
                    parent = request.parents[index - request.chain]
                    before = first + (request.chain - 1 if parent == ROOT else request.chain + parent)
                    positions.append(positions[before] + 1)
                    sees[row] = sees[before]
                    sees[row, begin + slot] = True
                    slot_positions[begin + slot] = positions[-1]
                own.append((owned[slot // BLOCK], slot % BLOCK))
            tokens += request.tokens
        missing = rows - len(tokens)
        own += [(padding, 0)] * missing
        self.tokens.copy_(torch.tensor(tokens + [0] * missing))
        self.positions.copy_(torch.tensor(positions + [0] * missing))
        self._own_block.copy_(torch.tensor([block for block, _ in own]))
        self._own_offset.copy_(torch.tensor([offset for _, offset in own]))
        self._blocks.copy_(torch.tensor(gathered + [padding] * (blocks - len(gathered))))
        self._slot_positions.copy_(slot_positions)
        self._sees.copy_(sees)

    def enter(self) -> None:
        """``fill`` has put all where it is read."""

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._pool.keys[call.entry], self._pool.values[call.entry]
        keys[self._own_block, :, :, self._own_offset] = key.transpose(0, 1)
        values[self._own_block, :, self._own_offset, :-1] = value.transpose(0, 1)
        # [kv heads, slots, size]
        seen_keys = keys.index_select(0, self._blocks).permute(1, 0, 3, 2).flatten(1, 2)
        seen_values = values.index_select(0, self._blocks)[..., :-1].permute(1, 0, 2, 3).flatten(1, 2)
        rows, slots = self.positions[:, None], self._slot_positions[None]
        unseen = call.unseen(rows, slots)
        sees = self._sees if unseen is None else self._sees & ~unseen
        if call.softcap is not None or call.sinks is not None or call.bias is not None:
            bias = None if call.bias is None else call.bias.of(rows, slots)
            return _by_hand(call, query, seen_keys, seen_values, sees, bias)
        made = functional.scaled_dot_product_attention(
            query[None], seen_keys[None], seen_values[None], attn_mask=sees, scale=call.scale, enable_gqa=True
        )
        return made[0].transpose(0, 1)


def _by_hand(
    call: Call,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sees: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with features that torch's fused one lacks: [rows, heads, value size]; ``bias`` is [heads, rows, slots]."""
    keys, values = (each.repeat_interleave(call.share, 0) for each in (keys, values))
    scores = call.capped((query @ keys.transpose(1, 2)).float() * call.scale)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~sees, float("-inf"))
    if call.sinks is not None:
        # A further column, whose weight is dropped.
        scores = torch.cat([call.sinks[:, None, None].expand(-1, len(sees), -1), scores], dim=-1)
    weights = scores.softmax(-1)[..., -sees.shape[1] :].to(values.dtype)
    return (weights @ values).transpose(0, 1)
