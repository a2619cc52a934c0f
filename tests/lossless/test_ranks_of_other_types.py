"""Ranks share layers of every type that ``cut_layers`` takes, whatever is in them: the same bits as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.loading import cut_layers
from services.verifier.model.slice import ModelSlice
from speculation.errors import ConfigurationError
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_tensor_parallel import KINDS, MIXTURES, SIZES, config, passes
from tests.running.refusals import refuses

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("stages"),
]

_HEADS: dict[str, Any] = {"head_dim": 16}
_WINDOW: dict[str, Any] = {"head_dim": 16, "sliding_window": 24}
# By what they have that the types of test_tensor_parallel have not: products joined in one, embeddings that are multiplied,
# norms behind layers, rotary embeddings of other kinds, other norms, layers side by side, feed-forward layers without gates.
TYPES: dict[str, dict[str, Any]] = {
    "phi3": {}, "gemma2": _WINDOW, "glm4": _HEADS, "helium": _HEADS, "cohere2": _WINDOW, "nemotron": _HEADS,
    "gemma": _HEADS, "gemma3_text": _WINDOW, "vaultgemma": _WINDOW, "glm": _HEADS, "ministral": _WINDOW, "ministral3": _HEADS,
    "smollm3": {}, "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}, "seed_oss": _HEADS,
    "cohere": {}, "olmo": {"clip_qkv": 1.5}, "exaone4": _WINDOW, "hunyuan_v1_dense": _HEADS, "ernie4_5": _HEADS,
    "arcee": _HEADS, "apertus": {}, "jais2": _HEADS,
    "youtu": {
        "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_key_value_heads": 8,
    },
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 2,
    },
    "glm4_moe": {
        **_HEADS, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
# Sizes that three ranks share evenly.
BY_THREE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 321,
}


def made(model_type: str, folder: Path, **others: Any) -> Path:
    """A random model whose norms and biases are no ones and zeros."""
    torch.manual_seed(0)
    sizes = {
        **SIZES,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        **TYPES.get(model_type, {}),
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **others}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def test_every_type_that_is_cut_is_tested() -> None:
    others = {configured.model_type for _, configured, _ in (*KINDS.values(), *MIXTURES.values())}
    assert set(cut_layers.TYPES) == {"llama", *others, *TYPES}


@pytest.mark.examples(6)
@pytest.mark.parametrize("model_type", TYPES)
def test_the_same_bits_of_every_type(model_type: str, tmp_path: Path) -> None:
    folder = made(model_type, tmp_path)
    alone = passes(ModelSlice(config(folder), 0))
    assert alone.isfinite().all()
    for ranks in (2, 4):
        parts = ranks_of(config(folder, ranks))
        assert all(torch.equal(one, alone) for one in together(parts, passes))
        # Of each layer a rank has its share of all large matrices.
        whole = sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(folder).parameters())
        assert all(sum(one.numel() for one in part.model.parameters()) < whole / ranks + 0.1 * whole for part in parts)
    swapped = together(ranks_of(config(folder, 2), at=[1, 0]), passes)
    assert not any(torch.equal(one, alone) for one in swapped)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["phi3", "gemma2", "glm4", "smollm3"])
def test_the_same_bits_from_three_ranks(model_type: str, tmp_path: Path) -> None:
    folder = made(model_type, tmp_path, **BY_THREE)
    alone = passes(ModelSlice(config(folder), 0))
    assert all(torch.equal(one, alone) for one in together(ranks_of(config(folder, 3)), passes))


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"weights": "as_stored"}], ids=str)
def test_joint_products_in_fewer_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    """A rank reads its rows of the queries, of the keys and of the values, of gates and ups."""
    folder = made("phi3", tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    alone = passes(ModelSlice(config(folder, **options), 0))
    assert all(torch.equal(one, alone) for one in together(ranks_of(config(folder, 2, **options)), passes))


def test_ranks_judge_layers_alike(tmp_path: Path) -> None:
    """Before ranks are connected every token has a row of its own, so that a trial sees where they stand: these layers turn
    their queries otherwise than our kernel.
    """
    folder = made("helium", tmp_path)
    for part in (ModelSlice(config(folder), 0), *ranks_of(config(folder, 2))):
        assert not any(isinstance(layer.forward, FusedLayer) for layer in part.model.get_decoder().layers)


def test_norms_over_several_heads_are_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=2):
        ModelSlice(config(made("cohere", tmp_path, use_qk_norm=True), 2), 0)
