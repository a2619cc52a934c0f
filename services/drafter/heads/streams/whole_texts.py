"""Streams of many positions of whole texts at once: for training, and for the canary."""

from __future__ import annotations

import torch
from torch.nn import functional

from services.drafter.heads.streams.streams import Streams

# Positions of a text whose streams are computed at a time, where no gradient is wanted.
_ANCHORS = 32


def streams_of(module: Streams, states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """What the output layer reads of the streams of some positions, see ``main_and_streams``: [B, A, gamma, h]."""
    return main_and_streams(module, states, anchors)[1]


def main_and_streams(module: Streams, states: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output layer reads of the target's own rows at some positions, and of their streams.

    Main rows are computed once, and without a gradient where nothing about them is trained.

    Args:
        states: [B, T, h], the target's, of ``module.config.state_layer``. Padding may stand behind a text.
        anchors: int64 [B, A], positions.

    Returns:
        [B, A, h], and [B, A, gamma, h].
    """
    kept = MainRows()
    with torch.set_grad_enabled(torch.is_grad_enabled() and module.config.shared):
        everywhere = torch.arange(states.shape[1], device=states.device).expand(states.shape[:2])
        main: torch.Tensor = module(states, everywhere, kept, streams=0)
    few = anchors.shape[1] if torch.is_grad_enabled() else _ANCHORS
    parts = [anchors[:, begin : begin + few] for begin in range(0, anchors.shape[1], few)]
    return at(main, anchors), torch.cat([_streams(module, states, part, kept) for part in parts], dim=1)


def at(states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """The states [B, A, h] at ``anchors`` [B, A] of [B, T, h]."""
    return states.gather(1, anchors[..., None].expand(-1, -1, states.shape[-1]))


def _streams(module: Streams, states: torch.Tensor, anchors: torch.Tensor, kept: MainRows) -> torch.Tensor:
    rows, positions, seen = begun(module, states, anchors)
    hidden: torch.Tensor = module(rows, positions, BehindMain(kept, seen), streams=rows.shape[1])
    return hidden.view(*anchors.shape, module.config.num_streams, -1)


def begun(module: Streams, states: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the streams of ``anchors`` [B, A] begin, as R = A gamma rows.

    Returns:
        [B, R, h]; their positions [B, R]; and bool [B, 1, R, T + R], which main rows and streams each one sees.
    """
    batch, count = anchors.shape
    levels = module.config.num_streams
    rows = module.inputs(at(states, anchors).flatten(0, 1)).view(batch, count * levels, -1)
    ahead = torch.arange(levels, device=anchors.device)
    positions = (anchors[..., None] + 1 + ahead).flatten(1)
    whose = torch.arange(count, device=anchors.device).repeat_interleave(levels)
    level = ahead.repeat(count)
    own = (whose[:, None] == whose) & (level <= level[:, None])
    main = torch.arange(states.shape[1], device=anchors.device) <= anchors.repeat_interleave(levels, 1)[..., None]
    return rows, positions, torch.cat((main, own.expand(batch, -1, -1)), dim=-1)[:, None]


class MainRows(dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """An ``Attend`` for main rows: each sees itself and those before it. Keys and values are kept, by layer."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        self[layer] = key, value
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class BehindMain:
    """An ``Attend`` for rows of streams behind main rows."""

    def __init__(self, kept: MainRows, seen: torch.Tensor) -> None:
        self._kept = kept
        self._seen = seen

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        keys, values = (torch.cat(pair, dim=2) for pair in zip(self._kept[layer], (key, value), strict=True))
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=self._seen, enable_gqa=True)
