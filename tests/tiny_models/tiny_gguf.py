"""A tiny random model as a GGUF file, written as llama.cpp would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tiny_models.random_blocks import random_blocks
from tests.tiny_models.tiny import make_tiny_model

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate": "ffn_gate_inp",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


# Types that the gguf package does not quantise to: their blocks are random.
DRAWN = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "MXFP4", "NVFP4")
ALIKE = {"attn_norm": "F32", "ffn_norm": "F32", "attn": "Q4_1", "ffn": "Q4_0", "token_embd": "Q8_0"}
# As llama.cpp's Q4_K_M, in which some matrices have more bits than others; Q5_K besides. Blocks have 256 inputs.
Q4_K_M = {
    "_norm": "F32",
    "attn_v": "Q6_K",
    "attn_output": "Q5_K",
    "attn": "Q4_K",
    "ffn_down": "Q6_K",
    "ffn": "Q4_K",
    "token_embd": "Q6_K",
}
# Types of few bits, all in one file.
FEW_BITS = {
    "_norm": "F32",
    "attn_v": "IQ4_NL",
    "attn_output": "MXFP4",
    "attn": "IQ4_XS",
    "ffn_gate": "Q2_K",
    "ffn_up": "Q3_K",
    "ffn_down": "IQ4_XS",
    "token_embd": "Q3_K",
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1}


def make_tiny_gguf(folder: Path, kinds: Mapping[str, str], *, without: str = "", **overrides: object) -> Path:
    """Write ``tiny.gguf``; ``kinds`` says by part of a tensor's name what it is stored as, float32 else.

    Args:
        without: a tensor that is left out.
        overrides: of the model's configuration.
    """
    source = make_tiny_model(folder / "source", **overrides)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, tokenizer = model.config, json.loads((source / "tokenizer.json").read_text())
    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    _describe(writer, config, tokenizer)
    for name, weight in model.state_dict().items():
        own = _gguf_name(name)
        if own is None or own == without:
            continue
        data = _in_its_order(own, weight.numpy(), config.num_attention_heads, config.num_key_value_heads)
        _add(writer, own, data, kinds)
    return _written(writer, folder / "tiny.gguf")


def make_tiny_mixture_gguf(folder: Path, kinds: Mapping[str, str], experts: int = 4) -> Path:
    """Likewise a Qwen3-MoE, with the one width of experts that transformers reads from GGUF."""
    source = make_tiny_model(folder / "source", **WIDE)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 768, "head_dim": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    known = AutoConfig.from_pretrained(source)
    config = Qwen3MoeConfig(
        **sizes, vocab_size=known.vocab_size, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_experts=experts, num_experts_per_tok=2, max_position_embeddings=512, initializer_range=0.1,
        tie_word_embeddings=True, norm_topk_prob=True, eos_token_id=0,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).requires_grad_(False)
    writer = GGUFWriter(folder / "tiny.gguf", "qwen3moe")
    _describe(writer, config, json.loads((source / "tokenizer.json").read_text()))
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(768)
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for own, half in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                _add(writer, f"blk.{name.split('.')[2]}.ffn_{own}_exps.weight", half.contiguous().numpy(), kinds)
        elif (own_name := _gguf_name(name)) is not None:
            _add(writer, own_name, weight.numpy(), kinds)
    return _written(writer, folder / "tiny.gguf")


def _describe(writer: GGUFWriter, config: Any, tokenizer: Any) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([3 if token.startswith("<|") else 1 for token, _ in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)


def _add(writer: GGUFWriter, name: str, data: np.ndarray, kinds: Mapping[str, str]) -> None:
    kind = next((kind for part, kind in kinds.items() if part in name), "F32")
    if kind in DRAWN:
        rows = random_blocks(int(np.prod(data.shape[:-1])), data.shape[-1], kind, size=float(data.std()), seed=len(name))
        made = rows.reshape(*data.shape[:-1], -1)
    else:
        made = quants.quantize(data, GGMLQuantizationType[kind]) if kind != "F32" else data
    writer.add_tensor(name, made, raw_dtype=GGMLQuantizationType[kind])


def _written(writer: GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str | None:
    if name == "lm_head.weight":
        return None
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _in_its_order(name: str, weight: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring pairs, transformers halves."""
    if "attn_q." not in name and "attn_k." not in name:
        return weight
    count = heads if "attn_q." in name else kv_heads
    halves = weight.reshape(count, 2, len(weight) // count // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
