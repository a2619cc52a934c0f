"""Writes a head as a checkpoint that others read too: EAGLE's layouts, or the speculators library's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from services.drafter.heads.draft_vocabulary import membership, offsets_of_ids
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.files.head_files import CONFIG
from services.drafter.heads.files.layouts import DRAFT_OFFSETS, DRAFTED, EAGLE, EAGLE3, FSPAD, SPECULATORS_EAGLE3, HeadLayout
from services.drafter.heads.files.target_shape import TRAINING
from services.model_files.weights.headers import SINGLE
from speculation.errors import ConfigurationError
from speculation.files import write_whole


def save_head(
    head: FeatureHead,
    folder: Path,
    training: Mapping[str, Any],
    *,
    form: Literal["eagle", "speculators"] = "eagle",
    dtype: torch.dtype = torch.bfloat16,
    target_name: str = "",
) -> None:
    """Write model.safetensors, config.json and training.json to ``folder``; ``load_head`` makes the same head of them.

    The target's own embeddings and output rows are left out, as EAGLE does.

    Args:
        training: for training.json: how the head was made. Its ``tokenizer_sha256`` is checked whenever the head is loaded.
        target_name: name or path of the target, for the speculators library.

    Raises:
        ConfigurationError: the form has no place for such a head.
        OSError: a file cannot be written.
    """
    config = head.config
    layout = _layout(config, form)
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
    write_whole(folder / CONFIG, json.dumps(public_fields(config, layout, target_name), indent=2).encode())


def _layout(config: HeadConfig, form: str) -> HeadLayout:
    if config.family == "eagle3" and config.fc and min(config.state_layers) < 0:
        raise ConfigurationError(
            field="state_layers", value=config.state_layers, allowed="counted from the first layer to be saved"
        )
    if form == "speculators":
        if config.family != "eagle3":
            raise ConfigurationError(
                field="form", value="speculators", allowed=f"eagle for a head of the family {config.family}"
            )
        return SPECULATORS_EAGLE3
    if config.family == "eagle3":
        return EAGLE3
    return FSPAD if config.sampler else EAGLE


def public_fields(config: HeadConfig, layout: HeadLayout, target_name: str = "") -> dict[str, Any]:
    """``config.json`` for a head in this layout. EAGLE-3's layers are indices into transformers' ``hidden_states``."""
    layer: dict[str, Any] = {
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
    }
    if config.window is not None:
        layer |= {"sliding_window": config.window, "layer_types": ["sliding_attention"] * config.num_layers}
    own: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "logit_scale": config.logit_scale,
    }
    if config.family != "eagle3":
        return {"architectures": ["LlamaForCausalLM"], **layer, **own, "bias": config.fc_bias}
    own |= {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if config.fc:
        own["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config.state_layers]
    else:
        own["eagle_config"] = {"use_aux_hidden_state": False}
    if layout is not SPECULATORS_EAGLE3:
        return {"architectures": ["LlamaForCausalLM"], **layer, **own}
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        **own,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }
