"""Blocks behind every position of a whole text at once, for the canary."""

from __future__ import annotations

import torch
from torch.nn import functional

from services.drafter.heads.blocks.drafter import BlockDrafter

# Blocks that are computed at a time.
_AT_ONCE = 32


def blocks_of(drafter: BlockDrafter, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """What the output layer reads of the guesses behind each position: from the states up to it, and the token behind it.

    Args:
        tokens: int64 [n].
        states: [n, h_t * layers], of the drafter's layers.

    Returns:
        [n, levels, h]; of the last position, which has no token behind it, nothing that means anything.
    """
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        kept[layer] = keys, values

    everywhere = torch.arange(len(tokens), device=tokens.device)
    drafter.keep_states(states[None], everywhere[None], keep)
    return torch.cat([_behind(drafter, tokens, part, kept) for part in torch.split(everywhere, _AT_ONCE)])


def _behind(
    drafter: BlockDrafter,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """[positions, levels, h], of the blocks behind ``positions``."""
    config, count = drafter.config, len(positions)
    own = positions[:, None] + 1 + torch.arange(config.block_size, device=tokens.device)
    context = torch.arange(len(tokens), device=tokens.device).expand(count, -1)
    # Of each block: the positions of all rows that it may see, and whether they are its own.
    seen = torch.cat((context, own), dim=1)[:, None]
    inside = torch.arange(seen.shape[2], device=tokens.device) >= len(tokens)
    before = inside | (seen <= positions[:, None, None])

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        keys, values = (
            torch.cat((held.expand(count, -1, -1, -1), new), dim=2)
            for held, new in zip(kept[layer], (key, value), strict=True)
        )
        mask = before & (seen <= own[..., None]) if config.causal[layer] else before.expand(-1, own.shape[1], -1)
        if (window := config.windows[layer]) is not None:
            mask = mask & ((seen - own[..., None]).abs() < window)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None], enable_gqa=True)

    anchors = tokens[(positions + 1).clamp(max=len(tokens) - 1)]
    return drafter.guesses(drafter(drafter.block_of(anchors), own, attend))
