"""Tiny head checkpoints of every public layout, and what they compute, written from the formulas in plain tensor code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# The target: tests/tiny_models/tiny.py with eight layers.
HIDDEN, VOCABULARY, LAYERS = 64, 320, 8
# The head: sizes of its own.
HEADS, GROUPS, DIM, INNER, DRAFTED = 8, 4, 8, 96, 48
THETA, EPS = 5000.0, 1e-5

Tensors = dict[str, torch.Tensor]


@dataclass
class HeadCheckpoint:
    """A checkpoint that is about to be written."""

    config: dict[str, Any]
    tensors: Tensors
    training: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write it as others would: config.json and model.safetensors."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.training:
            (folder / "training.json").write_text(json.dumps(self.training))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def tensor(name: str, value: torch.Tensor | None) -> Callable[[HeadCheckpoint], None]:
    """Gives a checkpoint another tensor; None: takes it out."""

    def change(checkpoint: HeadCheckpoint) -> None:
        if value is None:
            del checkpoint.tensors[name]
        else:
            checkpoint.tensors[name] = value

    return change


def layer_config(**changes: Any) -> dict[str, Any]:
    """The fields of the decoder layer."""
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "max_position_embeddings": 128,
        "rope_theta": THETA,
        "vocab_size": VOCABULARY,
        **changes,
    }


def eagle(**changes: Any) -> HeadCheckpoint:
    """EAGLE-1 and 2: no norm before attention, none before the output layer, which is the target's."""
    tensors = {"fc.weight": numbers(HIDDEN, 2 * HIDDEN), "fc.bias": numbers(HIDDEN), **decoder("layers.0.", HIDDEN)}
    return HeadCheckpoint(layer_config(bias=True, **changes), tensors)


def hass() -> HeadCheckpoint:
    """HASS in vLLM's form: norms before fc, the fields of the layer nested, a decoder's norms saved but skipped."""
    plain = eagle()
    nested = {**plain.config, "add_para_norm": True}
    config = {
        "model_type": "eagle",
        "model": nested,
        "vocab_size": VOCABULARY,
        "truncated_vocab_size": VOCABULARY,
        "eagle_fc_bias": True,
    }
    tensors = {f"model.{name}" if name.startswith("layers") else name: tensor for name, tensor in plain.tensors.items()}
    norms = {name: numbers(HIDDEN) for name in ("enorm.weight", "hnorm.weight", "model.norm.weight")}
    return HeadCheckpoint(config, {**tensors, **norms, "model.layers.0.input_layernorm.weight": numbers(HIDDEN)})


def fspad(*, sampler: bool = True, two_outputs: bool = True) -> HeadCheckpoint:
    """FSPAD, or one of its ablations."""
    written = (2 if two_outputs else 1) * HIDDEN
    tensors = {"fc.weight": numbers(HIDDEN, 2 * HIDDEN), "fc.bias": numbers(HIDDEN), **decoder("layers.0.", HIDDEN)}
    tensors["layers.0.mlp.down_proj.weight"] = numbers(written, INNER)
    if sampler:
        tensors = {name.replace("fc.", "fc.fc."): tensor for name, tensor in tensors.items()}
        tensors |= {f"fc.mlp.{name}": tensor for name, tensor in mlp(HIDDEN).items()}
        tensors["fc.post_attention_layernorm.weight"] = numbers(HIDDEN)
    return HeadCheckpoint(layer_config(bias=True), tensors)


def eagle3(prefix: str = "midlayer.", **changes: Any) -> HeadCheckpoint:
    """EAGLE-3 as its authors and SpecForge save it; with ``prefix="layers.0."`` as the speculators library does."""
    ids = torch.arange(DRAFTED) * 6 + 3
    tensors = {
        "fc.weight": numbers(HIDDEN, 3 * HIDDEN),
        **decoder(prefix, 2 * HIDDEN),
        f"{prefix}input_layernorm.weight": numbers(HIDDEN),
        f"{prefix}hidden_norm.weight": numbers(HIDDEN),
        "norm.weight": numbers(HIDDEN),
        "lm_head.weight": numbers(DRAFTED, HIDDEN),
        "d2t": ids - torch.arange(DRAFTED),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True),
    }
    return HeadCheckpoint(layer_config(draft_vocab_size=DRAFTED, **changes), tensors)


def peagle(prefix: str = "midlayer.", layers: int = 2, **changes: Any) -> HeadCheckpoint:
    """P-EAGLE as vLLM reads it: an EAGLE-3 head of several layers, embeddings of its own, and what stands for a mask."""
    made = eagle3(prefix, num_hidden_layers=layers, **{"mask_token_id": 300, "num_depths": 4, **changes})
    for number in range(1, layers):
        made.tensors |= decoder(f"layers.{number}.", HIDDEN)
        made.tensors[f"layers.{number}.input_layernorm.weight"] = numbers(HIDDEN)
    made.tensors |= {"mask_hidden": torch.randn(1, 1, 3 * HIDDEN), "embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN)}
    return made


def speculators_peagle() -> HeadCheckpoint:
    """P-EAGLE in the speculators library's layout."""
    made, like = peagle("layers.0."), speculators_eagle3().config
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    own = {
        "speculators_model_type": "peagle",
        "architectures": ["PEagleSpeculator"],
        "transformer_layer_config": layer_config(num_hidden_layers=2),
        "mask_token_id": 300,
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [proposal]},
    }
    return HeadCheckpoint(like | own, made.tensors)


def speculators_eagle3() -> HeadCheckpoint:
    """EAGLE-3 in the speculators library's layout, which takes norm_before_residual as true."""
    made = eagle3("layers.0.")
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
    }
    return HeadCheckpoint(config, made.tensors)


def speculators_eagle(*, layernorms: bool = True) -> HeadCheckpoint:
    """The speculators library's older layout of EAGLE-1, with or without its three norms."""
    plain = eagle().tensors
    tensors = {name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): each for name, each in plain.items()}
    if layernorms:
        names = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight", "transformer.input_layernorm.weight")
        tensors |= {name: numbers(HIDDEN) for name in names}
    config = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator"],
        "transformer_layer_config": layer_config(),
        "layernorms": layernorms,
        "fusion_bias": True,
    }
    return HeadCheckpoint(config, tensors)


def numbers(*shape: int) -> torch.Tensor:
    """Random weights; norms (one number per column) around 1."""
    if len(shape) == 1:
        return 1 + 0.3 * torch.randn(*shape)
    return torch.randn(*shape) / math.sqrt(shape[-1])


def mlp(read: int) -> Tensors:
    """A gated MLP."""
    return {
        "gate_proj.weight": numbers(INNER, read),
        "up_proj.weight": numbers(INNER, read),
        "down_proj.weight": numbers(read, INNER),
    }


def decoder(prefix: str, read: int) -> Tensors:
    """A decoder layer without the norms before attention, which reads ``read`` numbers."""
    tensors = {
        "self_attn.q_proj.weight": numbers(HEADS * DIM, read),
        "self_attn.k_proj.weight": numbers(GROUPS * DIM, read),
        "self_attn.v_proj.weight": numbers(GROUPS * DIM, read),
        "self_attn.o_proj.weight": numbers(HIDDEN, HEADS * DIM),
        "post_attention_layernorm.weight": numbers(HIDDEN),
        **{f"mlp.{name}": tensor for name, tensor in mlp(HIDDEN).items()},
    }
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


# What they compute, for one text: rows [R, ...], float64.


def normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm."""
    return rows / (rows.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def gated(gate: torch.Tensor, rows: torch.Tensor, weights: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """down(silu(gate) * up)."""
    opened = gate @ weights[f"{prefix}gate_proj.weight"].T
    opened = opened / (1 + torch.exp(-opened))
    return (opened * (rows @ weights[f"{prefix}up_proj.weight"].T)) @ weights[f"{prefix}down_proj.weight"].T


def attended(rows: torch.Tensor, weights: Mapping[str, torch.Tensor], prefix: str, theta: float = THETA) -> torch.Tensor:
    """Causal attention with rotary positions 0, 1, ..., row by row and head by head."""

    def project(name: str) -> torch.Tensor:
        out = rows @ weights[f"{prefix}{name}_proj.weight"].T
        bias = weights.get(f"{prefix}{name}_proj.bias")
        return out if bias is None else out + bias

    def turn(row: torch.Tensor, position: int) -> torch.Tensor:
        half = DIM // 2
        angles = position * theta ** (-torch.arange(half, dtype=torch.float32).double() * 2 / DIM)
        first, second = row[:half], row[half:]
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))

    query, key, value = project("q"), project("k"), project("v")
    made = torch.zeros(len(rows), HEADS * DIM, dtype=rows.dtype)
    for head in range(HEADS):
        own, group = slice(head * DIM, (head + 1) * DIM), head * GROUPS // HEADS
        shared = slice(group * DIM, (group + 1) * DIM)
        keys = torch.stack([turn(row, at) for at, row in enumerate(key[:, shared])])
        for at in range(len(rows)):
            scores = keys[: at + 1] @ turn(query[at, own], at) / math.sqrt(DIM)
            made[at, own] = torch.softmax(scores, 0) @ value[: at + 1, shared]
    out = made @ weights[f"{prefix}o_proj.weight"].T
    bias = weights.get(f"{prefix}o_proj.bias")
    return out if bias is None else out + bias


def after_attention(rows: torch.Tensor, weights: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """The second half of a decoder layer; the residual goes to both outputs of FSPAD."""
    added = gated(*[normed(rows, weights[f"{prefix}post_attention_layernorm.weight"])] * 2, weights, f"{prefix}mlp.")
    return torch.cat([rows] * (added.shape[-1] // HIDDEN), -1) + added


def eagle_forward(weights: Tensors, embeddings: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """EAGLE-1, HASS and FSPAD: what the output layer reads, and what is fed back."""
    sampler = "fc.fc.weight" in weights
    fc = "fc.fc." if sampler else "fc."
    if "enorm.weight" in weights:
        embeddings, states = normed(embeddings, weights["enorm.weight"]), normed(states, weights["hnorm.weight"])
    rows = torch.cat((embeddings, states), -1) @ weights[f"{fc}weight"].T + weights.get(f"{fc}bias", torch.zeros(()))
    if sampler:
        rows = rows + gated(embeddings, normed(rows, weights["fc.post_attention_layernorm.weight"]), weights, "fc.mlp.")
    rows = rows + attended(rows, weights, "layers.0.self_attn.")
    rows = after_attention(rows, weights, "layers.0.")
    return (rows[:, :HIDDEN], rows[:, HIDDEN:]) if rows.shape[-1] > HIDDEN else (rows, rows)


def eagle3_forward(
    weights: Tensors, embeddings: torch.Tensor, states: torch.Tensor, flags: Mapping[str, bool], prefix: str = "midlayer."
) -> tuple[torch.Tensor, torch.Tensor]:
    """EAGLE-3 on the target's three states [R, 3 h]."""
    if "input_norm.weight" in weights:
        states = normed(states, weights["input_norm.weight"])
    if "fc_norm.0.weight" in weights:
        parts = [normed(part, weights[f"fc_norm.{at}.weight"]) for at, part in enumerate(states.split(HIDDEN, -1))]
        states = torch.cat(parts, -1)
    fused = states @ weights["fc.weight"].T + weights.get("fc.bias", torch.zeros(()))
    inner = normed(fused, weights[f"{prefix}hidden_norm.weight"])
    residual = inner if flags.get("norm_before_residual") else fused
    both = torch.cat((normed(embeddings, weights[f"{prefix}input_layernorm.weight"]), inner), -1)
    rows, number = after_attention(residual + attended(both, weights, f"{prefix}self_attn."), weights, prefix), 1
    while (norm := weights.get(f"layers.{number}.input_layernorm.weight")) is not None:
        further = f"layers.{number}."
        rows = after_attention(rows + attended(normed(rows, norm), weights, f"{further}self_attn."), weights, further)
        number += 1
    hidden = normed(rows, weights["norm.weight"])
    return hidden, hidden if flags.get("norm_output") else rows
