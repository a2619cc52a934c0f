"""Tiny random models of architectures whose attention differs from Llama's, with windows and chunks that a test outgrows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.verifier.loading.adapters import exact_attention

_ALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
_GROUPED: dict[str, Any] = {
    **_ALL, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    **_GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_GROUPED, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 48, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
_BOTH = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# By a name for it: the type, and its settings.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft caps": ("gemma2", {**_GROUPED, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16,
                             "attn_logit_softcapping": 3.0}),
    "heads of other sizes": ("gemma4_text", {**_GROUPED, "num_hidden_layers": 4, "layer_types": _BOTH, "head_dim": 16,
                                             "global_head_dim": 32, "sliding_window": 16, "num_kv_shared_layers": 1,
                                             "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300}),
    "shared keys": ("gemma3n_text", {**_GROUPED, "num_hidden_layers": 4, "layer_types": _BOTH, "head_dim": 16,
                                     "sliding_window": 16, "num_kv_shared_layers": 1, "intermediate_size": [96] * 4,
                                     "activation_sparsity_pattern": None, "laurel_rank": 8, "hidden_size_per_layer_input": 16,
                                     "vocab_size_per_layer_input": 300, "altup_num_inputs": 4}),
    "sinks": ("gpt_oss", {**_EXPERTS, "head_dim": 16, "sliding_window": 16}),
    "chunks": ("llama4_text", {**_EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "attention_chunk_size": 16,
                               "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96}),
    "window in the mask alone": ("qwen2_moe", {**_EXPERTS, "sliding_window": 16, "use_sliding_window": True,
                                               "max_window_layers": 1}),
    "window in the mask of all": ("phimoe", {**_EXPERTS, "sliding_window": 16, "rope_parameters": _DEFAULT_ROPE}),
    "latent": ("minicpm3", {**_LATENT, "head_dim": None}),
    "latent, experts": ("deepseek_v3", _LATENT),
    "latent, older": ("deepseek_v2", {**_LATENT, "moe_layer_freq": 1}),
    "two calls a layer": ("diffllama", _GROUPED),
    "one key for all heads": ("gpt_bigcode", {**_ALL, "n_inner": 96, "n_positions": 512, "multi_query": True}),
    "alibi": ("bloom", _ALL),
    "alibi, odd heads": ("bloom", {**_ALL, "num_attention_heads": 6, "hidden_size": 96}),
    "alibi by distance": ("mpt", {**_ALL, "max_seq_len": 512}),
    "falcon": ("falcon", {**_ALL, "ffn_hidden_size": 96}),
    "falcon, alibi": ("falcon", {**_ALL, "alibi": True, "multi_query": False, "parallel_attn": False}),
    "falcon, newer": ("falcon", {**_ALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gptj": ("gptj", {**_ALL, "n_positions": 512, "rotary_dim": 8}),
    "codegen": ("codegen", {**_ALL, "n_positions": 512, "rotary_dim": 8}),
    "local and global": ("gpt_neo", {**_ALL, "num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]],
                                     "window_size": 16, "max_position_embeddings": 512}),
    "keywords not handed down": ("stablelm", {**_GROUPED, "num_key_value_heads": 4}),
}  # fmt: skip


def make_architecture(folder: Path, name: str) -> PreTrainedModel:
    """Write a model of ``ARCHITECTURES`` to ``folder``; returns it as transformers has it, under its exact attention."""
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=exact_attention(config))
    model.float().eval()
    model.save_pretrained(folder)
    return model
