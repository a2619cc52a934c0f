"""Hidden states of named layers are transformers' own: in prompt chunks, at tree nodes, along accepted paths, whatever
else shares the pass; and asking for them changes no logit."""

from __future__ import annotations

from typing import Any

import pytest

# One process, since the models are shared.
pytestmark = pytest.mark.xdist_group("hidden states")

LAYERS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 0,
}  # fmt: skip
_GPT: dict[str, Any] = {
    "vocab_size": 300, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 16},
    "gpt2": _GPT,
    "gemma": {**_SIZES, "head_dim": 16},
    "gemma3_text": {**_SIZES, "head_dim": 16, "sliding_window": 16},
    "opt": {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": _SIZES,
}
