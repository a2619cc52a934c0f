"""A tiny configuration of any causal language model that transformers knows, made by rules from the fields of its class."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

HIDDEN = 64
LAYERS = 4
# Of sliding windows and chunks: prompts and answers are longer, and no multiple of them.
WINDOW = 16

# The first that matches a field's whole name says its value. None of them is given to a field whose default is no number,
# but for those that say "nothing" there by None and still may be set.
_RULES: tuple[tuple[str, object], ...] = (
    (r"eos_token_id|pad_token_id|eod_token_id", 0),
    (r"forced_\w+_token_id", None),
    (r"bos_token_id|sep_token_id|decoder_start_token_id", 1),
    (r"\w*token_(id|index)", 7),
    (r"initializer_range|init_std|initializer_factor|init_method_std|embed_init_std|emb_init_std", 0.4),
    (r"\w*dropout\w*|\w*layerdrop|\w*pdrop|\w*jitter\w*", 0.0),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers|num_decoder_layers|encoder_layers|num_blocks", LAYERS),
    (r"num_encoder_layers|depth|num_global_layers|num_mel_bins", 2),
    (r"num_attention_heads|n_heads?|num_heads|\w*attention_heads|linear_num_value_heads|index_n_heads", 4),
    (r"num_key_value_heads|\w*num_key_value_heads|kv_n_heads|linear_num_key_heads|num_kv_heads", 2),
    (r"head_dim|\w*_head_dim|global_head_dim|dim_head|d_kv", 16),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 32),
    (r"qk_nope_head_dim", 16),
    (
        r"hidden_size|d_model|n_embd|dim|embedding_size|hidden_dim|\w*_hidden_size|emb_dim|embed_dim|hidden_size_global",
        HIDDEN,
    ),
    (r"moe_intermediate_size|\w*shared\w*intermediate_size|expert_ffn_hidden_size|moe_ffn_hidden_size", 32),
    (
        r"intermediate_size|\w*_intermediate_size|ffn_dim|\w*_ffn_dim|ffn_hidden_size|n_inner|d_inner|dim_ff|dff|block_ff_dim",
        96,
    ),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|\w*max_position_embeddings", 512),
    (r"sliding_window|sliding_window_size|window_size|attention_window|local_attention\w*|attention_chunk_size", WINDOW),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|moe_top_k|topk|top_k_experts|num_experts_per_token", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"max_window_layers", 2),
    (r"query_pre_attn_scalar", 24),
    # Of what enters the first layer, once.
    (r"embedding_multiplier", 1.5),
    (r"\w*hidden_size_per_layer_input", 32),
    (r"rotary_dim", 8),
    (r"image_size", 28),
    (r"patch_size", 14),
)
# Of these None says "take another field's", or "there is none", and the rule's value makes it a case of its own.
_SET_THOUGH_NONE = (
    "sliding_window",
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "eos_token_id",
    "pad_token_id",
)
_SWITCHED_ON = ("use_sliding_window", "is_decoder")


def tiny_config(model_type: str, vocab_size: int) -> PreTrainedConfig:
    """The configuration of a few small layers, one of each kind that the type has.

    Raises:
        Exception: whatever the class raises where the rules do not suffice for it.
    """
    settings = _tiny(CONFIG_MAPPING[model_type], vocab_size)
    own = _OVERRIDES.get(model_type, {})
    return CONFIG_MAPPING[model_type](**_merged(settings, own))


def _merged(settings: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in own.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if nested else value
    return {name: value for name, value in merged.items() if value is not _ABSENT}


def _tiny(kind: type[PreTrainedConfig], vocab_size: int) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        found = _ruled(field.name, field.default)
        if found is not _ABSENT:
            settings[field.name] = found
        if re.fullmatch(r"(unpadded_|audio_)?vocab_size(_per_layer_input)?", field.name) and field.default is not None:
            settings[field.name] = vocab_size
        if field.name in _SWITCHED_ON:
            settings[field.name] = True
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        # Keys and values are made of one latent vector: as many as queries.
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if (types := _layer_types(kind)) is not None:
        settings["layer_types"] = types
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        usual = getattr(getattr(kind, "sub_configs_defaults", {}).get(name), "model_type", None)
        if dataclasses.is_dataclass(part):
            settings[name] = _tiny(part, vocab_size)
        elif usual in CONFIG_MAPPING:
            settings[name] = {**_tiny(CONFIG_MAPPING[usual], vocab_size), "model_type": usual}
    return settings


_ABSENT = object()


def _ruled(name: str, default: object) -> object:
    number = isinstance(default, int | float) and not isinstance(default, bool)
    for pattern, value in _RULES:
        if re.fullmatch(pattern, name):
            if number or value is None or name in _SET_THOUGH_NONE:
                return value
            return _ABSENT
    return _ABSENT


def _layer_types(kind: type[PreTrainedConfig]) -> list[str] | None:
    """Each kind of layer that the default configuration has, by turns."""
    fields = {field.name for field in dataclasses.fields(kind)}
    if "layer_types" not in fields:
        return None
    windowed = "use_sliding_window" in fields
    usual = getattr(kind(use_sliding_window=True, sliding_window=WINDOW) if windowed else kind(), "layer_types", None)
    if not usual:
        return None
    kinds = list(dict.fromkeys(usual))
    return [kinds[index % len(kinds)] for index in range(LAYERS)]


# Where the rules do not suffice.
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
}  # fmt: skip
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "sliding_window": WINDOW,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    "gemma3": {"vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "laurel_rank": 32},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "num_soft_tokens": 4}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    # Its window is in the cache of ``generate`` alone, not in its masks: as long as its positions, as in the real one.
    "moshi": {"audio_vocab_size": 64, "sliding_window": 512},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron_h": {"mamba_num_heads": 8, "ssm_state_size": 16},
    "prophetnet": {"num_encoder_layers": LAYERS},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "roc_bert": {"shape_vocab_size": 50, "pronunciation_vocab_size": 50, "shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "rwkv": {"rescale_every": 2},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    # transformers bounds time steps in prompts, and not after them: a bound that they do not come near.
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "time_step_min": 1e-9},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
_OVERRIDES["qwen4_exp"] = {"text_config": _OVERRIDES["qwen4_exp_text"]}
