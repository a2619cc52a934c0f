"""Keys and values of the target's own layers, made anew of the states that travel to drafters.

A layer's keys and values are a function of the state that enters it and of the position: so no row of the target's cache
need leave the verifier, and the target's own matrices, read from its files, make the very rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from services.drafter.heads.assistant.config import LookedAt, Rope
from services.drafter.heads.files.head_fields import refused_tensor
from services.drafter.heads.layer import Turns, turned
from services.model_files.weights.files import WeightFiles


def frequencies(rope: Rope, width: int) -> torch.Tensor:
    """[width / 2] float32; of pairs that are not turned, zeros."""
    pairs = int(rope.turned * width // 2)
    # They follow from the configuration, so they are there before any weight is.
    with torch.device("cpu"):
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / width
        return functional.pad(1.0 / rope.theta**exponents, (0, width // 2 - pairs)) / rope.factor


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetKeys:
    """One layer of the target, as far as it makes keys and values; no parameters of the drafter.

    Attributes:
        norm: [h_t], before its attention.
        key: [heads * width, h_t]; ``value`` the same, None: values are the keys before norm and positions.
        key_norm: [width].
    """

    shape: LookedAt
    eps: float
    norm: torch.Tensor
    key: torch.Tensor
    key_norm: torch.Tensor
    value: torch.Tensor | None

    def of(self, states: torch.Tensor, turns: Turns, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [B, R, heads * width] each, of states [B, R, h_t] at positions [B, R]."""
        width = self.shape.width
        rows = functional.rms_norm(states, (states.shape[-1],), self.norm, self.eps)
        key = functional.linear(rows, self.key).view(*rows.shape[:2], -1, width)
        value = key if self.value is None else functional.linear(rows, self.value).view(*rows.shape[:2], -1, width)
        key = functional.rms_norm(key, (width,), self.key_norm, self.eps).transpose(1, 2)
        key = turned(key, *turns.factors(positions, key.dtype)).transpose(1, 2)
        return key.flatten(2), functional.rms_norm(value, (width,), None, self.eps).flatten(2)


def read_keys(
    files: WeightFiles, shape: LookedAt, eps: float, where: str, device: str | torch.device, dtype: torch.dtype
) -> TargetKeys:
    """Of the target's ``files``.

    Args:
        where: the assistant, for errors.

    Raises:
        ConfigurationError: a weight is missing; names it.
    """

    def read(name: str) -> torch.Tensor:
        if (public := shape.prefix + name) not in files:
            raise refused_tensor(where, public, "missing", "the target makes its keys with it")
        return files.numbers(public).to(device, dtype)

    return TargetKeys(
        shape=shape,
        eps=eps,
        norm=read("input_layernorm.weight"),
        key=read("self_attn.k_proj.weight"),
        key_norm=read("self_attn.k_norm.weight"),
        value=read("self_attn.v_proj.weight") if shape.own_values else None,
    )
