"""Blocks behind many positions of whole texts at once: for training, and for the canary."""

from __future__ import annotations

import torch

from services.drafter.heads.blocks.drafter import BlockDrafter

# Blocks of a text that are computed at a time, where no gradient is wanted.
_AT_ONCE = 32

# A layer's keys and values, [B, key-value heads, T, head_dim] each.
_Pair = tuple[torch.Tensor, torch.Tensor]


def blocks_of(
    drafter: BlockDrafter,
    tokens: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the output layer reads of the guesses behind some positions: from the states up to each, and the token behind it.

    Args:
        tokens: int64 [B, T]. Padding may stand behind a text.
        states: [B, T, h_t * layers], of the drafter's layers.
        positions: int64 [B, A].
        known: bool [B, T], whether a state is there; None: all are.

    Returns:
        [B, A, levels, h]; of a text's last position, which has no token behind it, nothing that means anything.
    """
    kept: dict[int, _Pair] = {}

    def keep(keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        kept[layer] = keys, values

    everywhere = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    drafter.keep_states(states, everywhere, keep)
    few = positions.shape[1] if torch.is_grad_enabled() else _AT_ONCE
    parts = torch.split(positions, few, dim=1)
    return torch.cat([_behind(drafter, tokens, part, kept, known) for part in parts], dim=1)


def _behind(
    drafter: BlockDrafter,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    kept: dict[int, _Pair],
    known: torch.Tensor | None,
) -> torch.Tensor:
    """[B, positions, levels, h], of the blocks behind ``positions``."""
    (batch, count), size = positions.shape, drafter.config.block_size
    own = positions[..., None] + 1 + torch.arange(size, device=tokens.device)
    attend = _BlockAttention(drafter, positions, own, kept, tokens.shape[1], known)
    anchors = tokens.gather(1, (positions + 1).clamp(max=tokens.shape[1] - 1))
    hidden = drafter(drafter.block_of(anchors).flatten(1), own.flatten(1), attend)
    return drafter.guesses(hidden.view(batch, count, size, -1))


class _BlockAttention:
    """An ``Attend`` for blocks: each row sees the states up to its block's position, and rows of its own block.

    Args:
        positions: int64 [B, A], those that blocks stand behind.
        own: int64 [B, A, block size], the positions of their rows.
        length: of the texts.
    """

    def __init__(
        self,
        drafter: BlockDrafter,
        positions: torch.Tensor,
        own: torch.Tensor,
        kept: dict[int, _Pair],
        length: int,
        known: torch.Tensor | None,
    ) -> None:
        self._config = drafter.config
        self._kept = kept
        places = torch.arange(length, device=own.device)
        before = places <= positions[..., None]
        # [B, A, 1, T] and [B, A, size, T]: whether a state may be seen, and how far away it is.
        self._before = (before if known is None else before & known[:, None])[:, :, None]
        self._away = own[..., None] - places
        rows = torch.arange(own.shape[2], device=own.device)
        self._ahead = rows[:, None] - rows

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """[B, heads, A * size, d]."""
        groups, blocks = query.shape[1] // key.shape[1], self._before.shape[1]
        keys, values = (each.repeat_interleave(groups, dim=1) for each in self._kept[layer])
        own_keys, own_values = (_by_block(each.repeat_interleave(groups, dim=1), blocks) for each in (key, value))
        query = query * query.shape[-1] ** -0.5
        seen, among = self._seen(layer)
        scores = torch.cat(
            (
                _by_block(query @ keys.transpose(-1, -2), blocks).masked_fill(~seen[:, None], -torch.inf),
                (_by_block(query, blocks) @ own_keys.transpose(-1, -2)).masked_fill(~among, -torch.inf),
            ),
            dim=-1,
        )
        weights = scores.softmax(-1).to(query.dtype)
        length = keys.shape[2]
        found: torch.Tensor = weights[..., :length].flatten(2, 3) @ values
        among_own: torch.Tensor = (weights[..., length:] @ own_values).flatten(2, 3)
        return found + among_own

    def _seen(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which states each row sees, [B, A, 1 or size, T], and which rows of its block, [size, size]."""
        seen, among = self._before, torch.ones_like(self._ahead, dtype=torch.bool)
        if self._config.causal[layer]:
            among = self._ahead >= 0
        if (window := self._config.windows[layer]) is not None:
            seen, among = seen & (self._away.abs() < window), among & (self._ahead.abs() < window)
        return seen, among


def _by_block(rows: torch.Tensor, blocks: int) -> torch.Tensor:
    """[B, heads, A, size, d] of [B, heads, A * size, d]."""
    return rows.reshape(*rows.shape[:2], blocks, -1, rows.shape[-1])
