"""Rotary position embeddings of a head, computed for any position: there is no table that could be too short."""

from __future__ import annotations

import torch

from services.drafter.heads.files.head_config import FIXED, HeadConfig


class RotaryPositions:
    """Turns queries and keys by their positions.

    The frequencies stay float32 whatever type the head computes in: bfloat16 cannot tell neighbouring positions apart.
    """

    def __init__(self, config: HeadConfig) -> None:
        # They follow from the configuration, so they are there before any weight is.
        with torch.device("cpu"):
            self._frequencies, self._scale = _frequencies(config)
        self._on: dict[torch.device, torch.Tensor] = {}

    def factors(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [B, 1, R, head_dim] each, for positions [B, R]."""
        frequencies = self._on.get(positions.device)
        if frequencies is None:
            frequencies = self._on[positions.device] = self._frequencies.to(positions.device)
        angles = positions[:, None, :, None].to(frequencies.dtype) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


def turned(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """``rows`` [B, heads, R, head_dim] turned by their positions; numbers i and i + head_dim / 2 are one pair."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cosines + torch.cat((-second, first), dim=-1) * sines


def _frequencies(config: HeadConfig) -> tuple[torch.Tensor, float]:
    """[head_dim / 2] in float32, and the factor on cosines and sines, which differs from 1 only for scaled types."""
    kind = config.rope["rope_type"]
    if kind not in FIXED or kind == "default":
        # The types that depend on the length are loaded only where they equal the default (``head_checks``).
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (float(config.rope["rope_theta"]) ** exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=dict(config.rope),
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](model, torch.device("cpu"))
    return frequencies, float(scale)
