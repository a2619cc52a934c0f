"""Writes a trained head as a checkpoint that others read too: in EAGLE's layout, or in FSPAD's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from services.drafter.heads.draft_vocabulary import membership, offsets_of_ids
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.files.head_files import CONFIG
from services.drafter.heads.files.layouts import DRAFT_OFFSETS, DRAFTED, EAGLE, FSPAD
from services.drafter.heads.files.target_shape import TRAINING
from services.model_files.weights.headers import SINGLE
from speculation.files import write_whole


def save_head(head: FeatureHead, folder: Path, training: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model.safetensors, config.json and training.json to ``folder``; ``load_head`` makes the same head of them.

    The target's own embeddings and output rows are left out, as EAGLE does.

    Args:
        head: of any family but EAGLE-3, which is not trained here.
        training: for training.json: how the head was made. Its ``tokenizer_sha256`` is checked whenever the head is loaded.

    Raises:
        OSError: a file cannot be written.
    """
    config = head.config
    layout = FSPAD if config.sampler else EAGLE
    named = {layout.public(name): tensor.detach() for name, tensor in head.state_dict().items()}
    if not bool(head.missing_state.any()):
        del named[layout.public("missing_state")]
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in named.items()}
    if config.draft_vocab_size < config.vocab_size:
        ids = head.vocabulary.ids.cpu()
        tensors |= {DRAFT_OFFSETS: offsets_of_ids(ids), DRAFTED: membership(ids, config.vocab_size)}
    recorded = {**training, "layer_ids": "hidden_states"}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SINGLE, save(tensors, metadata={"format": "pt"}))
    write_whole(folder / TRAINING, json.dumps(recorded, indent=2).encode())
    write_whole(folder / CONFIG, json.dumps(public_fields(config), indent=2).encode())


def public_fields(config: HeadConfig) -> dict[str, Any]:
    """``config.json`` for a head."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": dict(config.rope),
        # Where older readers look.
        "rope_theta": config.rope["rope_theta"],
        "vocab_size": config.vocab_size,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "logit_scale": config.logit_scale,
        "bias": config.fc_bias,
    }
    if config.window is not None:
        fields |= {"sliding_window": config.window, "layer_types": ["sliding_attention"] * config.num_layers}
    return fields
