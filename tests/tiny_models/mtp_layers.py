"""Tiny MTP layers in every public layout, and what they compute, written from the formulas in plain tensor code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import head_checkpoints as dense
from tests.tiny_models.tiny import make_tiny_model, make_tiny_tokenizer

# The target's layers have the sizes of ``head_checkpoints``.
SIZES: dict[str, Any] = {
    "hidden_size": dense.HIDDEN,
    "intermediate_size": dense.INNER,
    "num_attention_heads": dense.HEADS,
    "num_key_value_heads": dense.GROUPS,
    "head_dim": dense.DIM,
    "rms_norm_eps": dense.EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": dense.THETA},
}
LAYERS = 2
# Public names, by layout, of what is not the decoder layer's, and the beginning of the decoder layer's names.
LAYOUTS: dict[str, tuple[dict[str, str], str]] = {
    "deepseek": (
        {"embed_norm": "enorm", "state_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"},
        f"model.layers.{LAYERS}.",
    ),
    "mimo": (
        {
            "embed_norm": "token_layernorm",
            "state_norm": "hidden_layernorm",
            "fc": "input_proj",
            "norm": "final_layernorm",
        },
        "model.mtp_layers.0.",
    ),
    "mimo_v2": (
        {"embed_norm": "enorm", "state_norm": "hnorm", "fc": "eh_proj", "norm": "final_layernorm"},
        "model.mtp.layers.0.",
    ),
    "qwen": (
        {
            "embed_norm": "mtp.pre_fc_norm_embedding",
            "state_norm": "mtp.pre_fc_norm_hidden",
            "fc": "mtp.fc",
            "norm": "mtp.norm",
        },
        "mtp.layers.0.",
    ),
    "ernie": (
        {
            "embed_norm": "model.mtp_emb_norm.0",
            "state_norm": "model.mtp_hidden_norm.0",
            "fc": "model.mtp_linear_proj.0",
        },
        "model.mtp_block.0.",
    ),
}
Tensors = dict[str, torch.Tensor]


def joint(size: int) -> Tensors:
    """What stands around the decoder layer, by canonical name."""
    norms = {f"{name}.weight": dense.numbers(size) for name in ("embed_norm", "state_norm", "norm")}
    return {**norms, "fc.weight": dense.numbers(size, 2 * size)}


def dense_layer() -> Tensors:
    """An MTP layer with Llama's decoder layer, by canonical name."""
    block = {**dense.decoder("block.", dense.HIDDEN), "block.input_layernorm.weight": dense.numbers(dense.HIDDEN)}
    return {**joint(dense.HIDDEN), **block}


def named(tensors: Mapping[str, torch.Tensor], layout: str) -> Tensors:
    """Tensors under the names of a layout; ERNIE's has no norm behind its decoder layer."""
    parts, block = LAYOUTS[layout]
    found: Tensors = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "block":
            found[block + rest] = tensor
        elif part in parts:
            whole = parts[part] if layout in ("qwen", "ernie") else block + parts[part]
            found[f"{whole}.{rest}"] = tensor
    return found


def make_target(folder: Path, **changes: Any) -> Path:
    """A target whose layers have these sizes."""
    return make_tiny_model(folder, num_hidden_layers=LAYERS, **{**SIZES, **changes})


def add_to(target: Path, tensors: Mapping[str, torch.Tensor], **fields: Any) -> Path:
    """Write tensors beside a model's own, as most checkpoints hold them."""
    file, config = target / "model.safetensors", target / "config.json"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return target


def with_mtp(target: Path, folder: Path, layers: int = 1) -> Path:
    """A copy of a target with MTP layers in DeepSeek's layout: copies of its last layer that read what they are given."""
    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(6)
    shutil.copytree(target, folder)
    held = load_file(folder / "model.safetensors")
    size = held["model.norm.weight"].shape[0]
    count = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    last = f"model.layers.{count - 1}."
    added: Tensors = {}
    for number in range(count, count + layers):
        own = f"model.layers.{number}."
        added |= {name.replace(last, own): each.clone() for name, each in held.items() if name.startswith(last)}
        added |= {f"{own}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
        added[f"{own}eh_proj.weight"] = torch.cat((0.3 * torch.randn(size, size), torch.eye(size)), dim=1)
    return add_to(folder, added, num_nextn_predict_layers=layers)


def alone(target: Path, folder: Path, layers: int = 1) -> Path:
    """The MTP layers of ``with_mtp`` in a folder of their own."""
    if not (folder / "config.json").is_file():
        whole = with_mtp(target, folder.parent / f"{folder.name}-whole", layers)
        config = json.loads((whole / "config.json").read_text())
        count = config["num_hidden_layers"]
        own = tuple(f"model.layers.{number}." for number in range(count, count + layers))
        held = load_file(whole / "model.safetensors")
        folder.mkdir(parents=True)
        save_file({name: each for name, each in held.items() if name.startswith(own)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    return folder


# Configurations of targets with other layers: experts, latent attention, rotary positions on a part, gates.
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 1,
        "num_key_value_heads": 8,
    },
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    "glm4_moe_lite": {
        **_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
        "head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
    },
    "qwen3_next": {
        **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "qwen2": {},
}  # fmt: skip
# The layout that each kind is published in, and which of its layers its MTP layer is like.
PUBLISHED = {"qwen3_next": ("qwen", 1), "ernie4_5_moe": ("ernie", 0), "qwen2": ("mimo", 1)}


@dataclass(frozen=True, kw_only=True)
class OfKind:
    """A target with an MTP layer whose decoder layer is of the target's kind.

    Attributes:
        like: a model whose layer ``number`` is that decoder layer.
        around: what stands around it, by canonical name.
    """

    target: Path
    layout: str
    like: Any
    number: int
    around: Tensors


def make_of_kind(kind: str, folder: Path) -> OfKind:
    """Write a random target of a model type, with an MTP layer in the layout that the type is published in."""
    layout, number = PUBLISHED.get(kind, ("deepseek", 1))
    fields = {**SIZES, "vocab_size": make_tiny_tokenizer(folder), "num_hidden_layers": LAYERS, **KINDS[kind]}
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **fields, **tokens, initializer_range=0.3, max_position_embeddings=512)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    like = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in like.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    like.save_pretrained(folder / "like")
    around, prefix = joint(dense.HIDDEN), f"model.layers.{number}."
    stored = load_file(folder / "like" / "model.safetensors")
    block = {f"block.{name.removeprefix(prefix)}": each for name, each in stored.items() if name.startswith(prefix)}
    add_to(folder, named({**around, **block}, layout), num_nextn_predict_layers=1)
    return OfKind(target=folder, layout=layout, like=like, number=number, around=around)


def forward(
    weights: Tensors,
    embeddings: torch.Tensor,
    states: torch.Tensor,
    *,
    state_first: bool = False,
    theta: float = dense.THETA,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output layer reads of ``dense_layer``, and what is fed back; rows [R, h] at positions 0, 1, ..."""
    pair = dense.normed(embeddings, weights["embed_norm.weight"]), dense.normed(states, weights["state_norm.weight"])
    rows = torch.cat(pair[::-1] if state_first else pair, -1) @ weights["fc.weight"].T
    inner = dense.normed(rows, weights["block.input_layernorm.weight"])
    rows = dense.after_attention(rows + dense.attended(inner, weights, "block.self_attn.", theta), weights, "block.")
    hidden = dense.normed(rows, weights["norm.weight"]) if "norm.weight" in weights else rows
    return hidden, hidden


def chain(target: Path, layers: Sequence[Tensors], layout: str = "deepseek", **fields: Any) -> Path:
    """Write several MTP layers beside a target's own."""
    # The layer's number stands alone between dots; ERNIE's tensors have it behind different names.
    number = re.compile(r"(?<=\.)\d+(?=\.)")
    tensors = {
        number.sub(lambda found, place=place: str(int(found[0]) + place), name, count=1): each
        for place, layer in enumerate(layers)
        for name, each in named(layer, layout).items()
    }
    return add_to(target, tensors, **{"num_nextn_predict_layers": len(layers), **fields})


def forward_several(
    layers: Sequence[Tensors], embeddings: torch.Tensor, states: torch.Tensor, *, chained: bool = True, **how: Any
) -> list[torch.Tensor]:
    """What the output layer reads of the rows of each layer, those of the positions whose states are there.

    Args:
        embeddings: [n, h], of the tokens from the first one on, as many as the last layer asks for.
        states: [positions, h], the target's.
    """
    made, read = [], states
    for ahead, weights in enumerate(layers, 1):
        hidden, _ = forward(weights, embeddings[ahead : ahead + len(states)], read, **how)
        made.append(hidden)
        read = hidden if chained else states
    return made
