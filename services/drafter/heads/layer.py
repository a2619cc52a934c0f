"""A head's decoder layer: Llama's, with the deviations of the EAGLE family.

Layer 0 of EAGLE-1 and 2 has no norm before its attention; that of EAGLE-3 attends to [normed embedding ; normed state],
twice as wide; FSPAD's MLP writes two outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from services.drafter.heads.files.head_config import FIXED, HeadConfig


class Turns:
    """Turns queries and keys by their positions.

    The frequencies stay float32 whatever type the head computes in: bfloat16 cannot tell neighbouring positions apart.

    Args:
        frequencies: [head_dim / 2] in float32.
        scale: on cosines and sines.
    """

    def __init__(self, frequencies: torch.Tensor, scale: float = 1.0) -> None:
        self._frequencies, self._scale = frequencies, scale
        self._on: dict[torch.device, torch.Tensor] = {}

    def factors(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, [B, 1, R, head_dim] each, for positions [B, R]."""
        frequencies = self._on.get(positions.device)
        if frequencies is None:
            frequencies = self._on[positions.device] = self._frequencies.to(positions.device)
        angles = positions[:, None, :, None].to(frequencies.dtype) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


class RotaryPositions(Turns):
    """Those of a head's configuration."""

    def __init__(self, config: HeadConfig) -> None:
        # They follow from the configuration, so they are there before any weight is.
        with torch.device("cpu"):
            super().__init__(*_frequencies(config))


def turned(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """``rows`` [B, heads, R, head_dim] turned by their positions; numbers i and i + head_dim / 2 are one pair."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cosines + torch.cat((-second, first), dim=-1) * sines


def _frequencies(config: HeadConfig) -> tuple[torch.Tensor, float]:
    """[head_dim / 2] in float32, and the factor on cosines and sines, which differs from 1 only for scaled types."""
    kind = config.rope["rope_type"]
    if kind not in FIXED or kind == "default":
        # The types that depend on the length are loaded only where they equal the default (``files.head_fields``).
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


# Attention over a layer's rows and what its caller keeps of earlier ones: query [B, heads, R, head_dim], key and value
# [B, key-value heads, R, head_dim], already turned by their positions, and the layer's number. Scores are divided by
# sqrt(head_dim). Returns [B, heads, R, head_dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
Activation = Callable[[torch.Tensor], torch.Tensor]


class TextAttend(Protocol):
    """An ``Attend`` over rows of texts and of what may follow them, which also hands states from each row to the next."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """As ``Attend``."""
        ...

    @property
    def depths(self) -> torch.Tensor:
        """[R], how many drafted tokens lead to each row, its own included; 0 for rows of the text."""
        ...

    def hand_on(self, states: torch.Tensor, number: int) -> None:
        """Keep a state [B, R, h] of each row for the row behind it; a row hands on several, by number."""
        ...

    def handed(self, number: int) -> torch.Tensor:
        """[B, R, h], what the row before each one handed on; zeros where there is none."""
        ...

    def keep(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Keep a layer's keys and values, [B, R, width] each, for rows that ``seen`` speaks of; nobody attends."""
        ...

    @property
    def looking(self) -> torch.Tensor | None:
        """Which of the pass's rows matter, int64; None: all. Of rows of a text, often the last one alone."""
        ...

    def seen(self, layer: int, window: int | None = None) -> Sequence[SeenRows]:
        """What the rows that matter see of what was kept, one after the other.

        A row of a text sees those up to itself, a drafted one those before the draft.

        Args:
            window: only the latest of these; None: as many as are held.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenRows:
    """What some rows, next to each other, see.

    Attributes:
        rows: how many they are.
        keys, values: [seen, width].
        mask: bool [rows, seen], which each one sees; None: all.
    """

    rows: int
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None


ACTIVATIONS: dict[str, Activation] = {
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


class HeadAttention(nn.Module):
    """Grouped-query attention of layer ``number``; layer 0 of EAGLE-3 reads 2 h."""

    def __init__(self, config: HeadConfig, number: int) -> None:
        super().__init__()
        self._number = number
        self._shape = (-1, config.head_dim)
        read = config.hidden_size * (2 if config.family == "eagle3" and number == 0 else 1)
        query, kept = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(read, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(read, kept, bias=config.qkv_bias)
        self.v_proj = nn.Linear(read, kept, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.o_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def keys_and_values(
        self, rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, R, read] to keys, turned by their positions, and values: [B, key-value heads, R, head_dim] each."""
        key, value = (each(rows).unflatten(-1, self._shape) for each in (self.k_proj, self.v_proj))
        if self.k_norm is not None:
            key = self.k_norm(key)
        return turned(key.transpose(1, 2), *turns), value.transpose(1, 2)

    @override
    def forward(self, rows: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """[B, R, read] to [B, R, h]."""
        query = self.q_proj(rows).unflatten(-1, self._shape)
        if self.q_norm is not None:
            query = self.q_norm(query)
        key, value = self.keys_and_values(rows, turns)
        attended = attend(turned(query.transpose(1, 2), *turns), key, value, self._number)
        written: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return written


class WidthsOfMLP(Protocol):
    """What a configuration says of an MLP."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def hidden_act(self) -> str: ...


class GatedMLP(nn.Module):
    """down(act(gate(a)) * up(b)): a decoder layer's MLP, where a is b, and the one in FSPAD's sampler."""

    def __init__(self, config: WidthsOfMLP, written: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, written, bias=bias)
        self._activation = ACTIVATIONS[config.hidden_act]

    @override
    def forward(self, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[..., h] twice to [..., written]."""
        written: torch.Tensor = self.down_proj(self._activation(self.gate_proj(gate)) * self.up_proj(rows))
        return written


class HeadLayer(nn.Module):
    """Decoder layer ``number``. Only the last one of FSPAD writes two outputs."""

    def __init__(self, config: HeadConfig, number: int) -> None:
        super().__init__()
        first, size, eps = number == 0, config.hidden_size, config.rms_norm_eps
        self._pair = config.family == "eagle3" and first
        self._normed_residual = config.norm_before_residual
        self._outputs = 2 if config.two_outputs and number == config.num_layers - 1 else 1
        normed = self._pair or not first or config.input_norm
        self.input_layernorm = nn.RMSNorm(size, eps=eps) if normed else None
        self.hidden_norm = nn.RMSNorm(size, eps=eps) if self._pair else None
        self.self_attn = HeadAttention(config, number)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(config, size * self._outputs, bias=config.mlp_bias)

    @override
    def forward(
        self, rows: torch.Tensor, embeddings: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """[B, R, h] to [B, R, h], or to [B, R, 2 h] with two outputs. Only layer 0 of EAGLE-3 reads the embeddings."""
        residual = rows
        if self.hidden_norm is not None and self.input_layernorm is not None:
            rows = self.hidden_norm(rows)
            if self._normed_residual:
                residual = rows
            rows = torch.cat((self.input_layernorm(embeddings), rows), dim=-1)
        elif self.input_layernorm is not None:
            rows = self.input_layernorm(rows)
        rows = residual + self.self_attn(rows, turns, attend)
        normed = self.post_attention_layernorm(rows)
        # Both outputs have the one residual.
        residual = torch.cat([rows] * self._outputs, dim=-1) if self._outputs > 1 else rows
        added: torch.Tensor = residual + self.mlp(normed, normed)
        return added
