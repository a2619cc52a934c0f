"""Writes a trained head as a checkpoint that others read too: in EAGLE's layout, EAGLE-3's, or FSPAD's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from services.drafter.heads.draft_vocabulary import membership, offsets_of_ids
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import FINAL, HeadConfig
from services.drafter.heads.files.head_files import CONFIG
from services.drafter.heads.files.layouts import DRAFT_OFFSETS, DRAFTED, EAGLE, EAGLE3, FSPAD
from services.drafter.heads.files.target_shape import TRAINING
from services.model_files.weights.headers import SINGLE
from speculation.files import write_whole


def save_head(
    head: FeatureHead,
    folder: Path,
    training: Mapping[str, Any],
    *,
    target_layers: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write model.safetensors, config.json and training.json to ``folder``; ``load_head`` makes the same head of them.

    The target's own embeddings and output rows are left out, as EAGLE does.

    Args:
        target_layers: how many layers the target has.
        training: for training.json: how the head was made. Its ``tokenizer_sha256`` is checked whenever the head is loaded.

    Raises:
        OSError: a file cannot be written.
    """
    config = head.config
    eagle3 = config.family == "eagle3"
    layout = EAGLE3 if eagle3 else FSPAD if config.sampler else EAGLE
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
    fields = public_fields(config) | (_eagle3_fields(config, target_layers) if eagle3 else {})
    write_whole(folder / CONFIG, json.dumps(fields, indent=2).encode())


def _eagle3_fields(config: HeadConfig, target_layers: int) -> dict[str, Any]:
    """Fields that EAGLE-3's config.json has besides."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": hidden_state_ids(config.state_layers, target_layers),
    }


def hidden_state_ids(layers: Iterable[int], target_layers: int) -> list[int]:
    """Layers as indices into transformers' ``hidden_states``, of which the last is the state behind the final norm."""
    return [target_layers if layer == FINAL else layer + 1 for layer in layers]


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
