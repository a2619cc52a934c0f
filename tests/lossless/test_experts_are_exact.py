"""Mixtures of experts, and others that multiply outside of linear layers: the same bits alone, in chunks, trees and batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.verifier.config import Kernels, TargetConfig
from services.verifier.kernels.cpu_choice import Choice, maker
from services.verifier.kernels.linears import pack_linears
from services.verifier.kernels.native.library import library
from services.verifier.kernels.parameters import inexact, multiplied, pack_parameters
from services.verifier.model.means import pack_layers
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.kernels.kernels_here import SETS, kernels_of
from tests.tiny_models.mixture import make_mixture
from tests.tiny_models.tiny import make_tiny_model

# Longer than a tile.
LENGTH, VOCABULARY, HIDDEN = 70, 300, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    # Neither fills whole vectors.
    "intermediate_size": 90,
    "moe_intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"n_positions": 256, "n_embd": HIDDEN, "n_head": 4, "n_layer": 2}
# Routers and experts of other kinds: softmax and sigmoid, shared experts, a router that is a linear layer, dense layers before.
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 44, "decoder_sparse_step": 1},
    "phimoe": {},
    "glm4_moe": {"first_k_dense_replace": 1},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "minimax_m2": {},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {},
}
MOST = ("gpt2", "mixtral", "qwen2_moe")
# Layers of these are tried by themselves, some are served and some are not: transposed weights and biases, all experts at
# once, groups of experts, experts that are parts of a matrix or do nothing.
DEEPSEEK = {
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "num_key_value_heads": 4,
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("model.layers.0.mlp", {}),
    "llama4_text": ("model.layers.0.feed_forward", {}),
    "jetmoe": ("model.layers.0.mlp", {}),
    "deepseek_v3": ("model.layers.0.mlp", {**DEEPSEEK, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}),
    "longcat_flash": (
        "model.layers.0.mlp",
        {**DEEPSEEK, "ffn_hidden_size": 90, "expert_ffn_hidden_size": 44, "num_layers": 1},
    ),
    "dbrx": (
        "transformer.blocks.0.ffn",
        {
            "d_model": HIDDEN,
            "n_heads": 4,
            "n_layers": 1,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {"moe_num_experts": 6, "moe_top_k": 2, "ffn_hidden_size": 44},
        },
    ),
}


@pytest.fixture(params=[*SETS, "onednn"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every kind that is here."""
    chosen: Kernels = request.param
    if chosen != "onednn":
        kernels_of(chosen)
    return chosen


def random_model(kind: str, settings: dict[str, Any]) -> Any:
    """A tiny model of that type, each of its matrices random."""
    known = type(AutoConfig.for_model(kind))
    usual = {name: value for name, value in SIZES.items() if name in vars(known()) or name in known.attribute_map}
    torch.manual_seed(1)
    config = known(**{**usual, **settings})
    # transformers' default way with experts wants strides of whole vectors.
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **ways).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.std() > 0:
            nn.init.normal_(parameter, std=0.4)
    return model


def chunk(name: str, context: int, tokens: list[int], logits: int) -> Rows:
    return Rows(request_id=name, context=context, tokens=tuple(tokens), logits=logits)


def served(folder: Path, kernels: Kernels, **settings: Any) -> TransformersTarget:
    return TransformersTarget(
        TargetConfig(model_path=str(folder), kernels=kernels, kv_cache_tokens=1024, max_model_len=256, **settings)
    )


def text_of(length: int) -> list[int]:
    source = random.Random(1)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def same_bits(target: TransformersTarget) -> torch.Tensor:
    """Plain decoding's logits, [LENGTH, vocabulary], which chunks beside others and trees must have, too."""
    text = text_of(LENGTH)
    for name in ("alone", "chunks", "other", "tree"):
        assert target.open(name, LENGTH + 16)
    alone = torch.stack([target.forward([chunk("alone", i, text[i : i + 1], 1)])[0][0] for i in range(LENGTH)])
    target.forward([chunk("other", 0, text[:20], 0)])
    for start, end in ((0, 2), (2, 9), (9, 42), (42, LENGTH)):
        beside = chunk("other", 20, text[:5], 5)
        part, _ = target.forward([chunk("chunks", start, text[start:end], end - start), beside])
        assert torch.equal(part, alone[start:end]), (start, end)
    at = 30
    target.forward([chunk("tree", 0, text[:at], 0)])
    # The true continuation, with others before, between and behind.
    tokens = (text[at], 7, text[at + 1], 9, text[at + 2], 11, 12)
    tree = Rows(request_id="tree", context=at, tokens=tokens, parents=(-1, -1, 0, 1, 3, 4), logits=7)
    made, _ = target.forward([tree, chunk("other", 20, text[:5], 5)])
    assert torch.equal(made[[0, 2, 4]], alone[at : at + 3])
    return alone


def greedy(target: TransformersTarget, prompt: list[int], count: int) -> list[int]:
    assert target.open("greedy", LENGTH + 16)
    made = [int(target.forward([chunk("greedy", 0, prompt, 1)])[0][0].argmax())]
    while len(made) < count:
        made.append(int(target.forward([chunk("greedy", len(prompt) + len(made) - 1, made[-1:], 1)])[0][0].argmax()))
    return made


@pytest.mark.examples(4)
@pytest.mark.parametrize(
    "kind", [kind if kind in MOST else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS]
)
def test_the_same_bits_and_transformers_tokens(tmp_path: Path, kernels: Kernels, kind: str) -> None:
    model = random_model(kind, KINDS[kind])
    make_tiny_model(tmp_path)
    model.save_pretrained(tmp_path)
    target = served(tmp_path, kernels)
    alone = same_bits(target)
    text = text_of(LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(alone, model(torch.tensor([text])).logits[0], atol=5e-4, rtol=1e-3)
        theirs = model.generate(
            torch.tensor([text[:20]]),
            attention_mask=torch.ones(1, 20, dtype=torch.long),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert greedy(target, text[:20], 16) == theirs[0, 20:].tolist()
    assert inexact(target._part.model) == []


@pytest.mark.examples(4)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_models_that_are_built_otherwise(kernels: Kernels, kind: str) -> None:
    """Rows of a layer that has experts: together, two by two, and without anything packed."""
    name, settings = LAYERS[kind]
    model = random_model(kind, settings)
    layer = model.get_submodule(name)
    assert list(multiplied(layer))
    rows = torch.randn(1, 24, HIDDEN)

    def made(given: torch.Tensor) -> torch.Tensor:
        result = layer(given)
        return (result if isinstance(result, torch.Tensor) else result[0]).reshape(given.shape[1], -1)

    with torch.inference_mode():
        plain = made(rows)
        pack_layers(model, TargetConfig(model_path="", kernels=kernels))
        packed = made(rows)
        assert torch.equal(packed, torch.cat([made(rows[:, i : i + 2]) for i in range(0, 24, 2)]))
        assert torch.equal(packed[:1], made(rows[:, :1]))
    torch.testing.assert_close(packed, plain, atol=1e-3, rtol=1e-3)
    assert inexact(layer) == []


@pytest.mark.examples(4)
@pytest.mark.parametrize("threads", [1, 3, 5])
def test_widths_and_threads_that_fill_no_vectors(tmp_path: Path, kernels: Kernels, threads: int) -> None:
    """SiLU over 1,000 columns: what a thread computes of them ends anywhere."""
    folder = make_tiny_model(tmp_path, intermediate_size=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.verifier.model.fused_layers.fuse", lambda *_: (0, "of the test"))
        target = served(folder, kernels, threads=threads)
    before = torch.get_num_threads()
    try:
        same_bits(target)
    finally:
        torch.set_num_threads(before)


@pytest.mark.examples(4)
def test_a_mixture_of_copies_says_what_the_dense_model_says(tmp_path: Path, tiny_model: Path, kernels: Kernels) -> None:
    target = served(make_mixture(tiny_model, tmp_path / "mixture"), kernels)
    mixed = same_bits(target)
    dense = same_bits(served(tiny_model, kernels))
    torch.testing.assert_close(mixed, dense, atol=5e-4, rtol=1e-3)
    assert torch.equal(mixed.argmax(-1), dense.argmax(-1))


def test_a_mixture_in_eight_bits(tmp_path: Path) -> None:
    """Experts that fill no whole blocks; the router keeps its weights."""
    if library() is None:
        pytest.skip("our kernels cannot be compiled or run here")
    model = random_model("mixtral", {})
    make_tiny_model(tmp_path)
    model.save_pretrained(tmp_path)
    target = served(tmp_path, "auto", dtype="int8")
    same_bits(target)
    mlp, plain = target._part.model.model.layers[0].mlp, model.model.layers[0].mlp
    assert torch.equal(mlp.gate.weight + 0, plain.gate.weight)
    difference = (mlp.experts.down_proj + 0 - plain.experts.down_proj).abs().max()
    assert 0 < difference < plain.experts.down_proj.abs().max() / 100


def test_what_multiplies_otherwise_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 8), requires_grad=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ri,eoi->reo", rows, self.weight)

    model = nn.Sequential(Odd(), nn.Linear(8, 8), nn.Conv1d(3, 3, 1))
    assert inexact(model) == ["Conv1d", "Linear"]
    rows = torch.randn(5, 8)
    plain = model[0](rows)
    make = maker(Choice(linears="onednn"))
    assert make is not None
    pack_linears(model, make)
    pack_parameters(model, make, make)
    assert torch.equal(model[0](rows), plain)
    assert inexact(model) == ["Conv1d", "Odd"]
