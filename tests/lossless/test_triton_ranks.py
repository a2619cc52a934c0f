"""Ranks that share every layer, by our kernels for GPUs in Triton's interpreter: the bits of one, trees and all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typing_extensions import override

pytest.importorskip("triton")
from services.verifier.attention.on_gpu import GpuAttention
from services.verifier.choosing.greatest import Finder
from services.verifier.config import Dtype, KVCacheDtype, TargetConfig
from services.verifier.kernels import gpu_choice
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.sharded_layers import ShardedLinear
from services.verifier.kernels.triton.byte_linear import ByteLinear
from services.verifier.kernels.triton.decoder_layer import RowDecoderLayer
from services.verifier.kernels.triton.row_experts import RowExperts
from services.verifier.kernels.triton.row_layers import RowFeedForward
from services.verifier.kernels.whole_vectors import fill_vectors
from services.verifier.model.means import TargetMeans
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target_port import Rows
from services.verifier.stages.stage_ranks import StageRanks
from tests.engine.virtual_ranks import Board, OnBoard
from tests.kernels.triton_interpreter import hopper
from tests.tiny_models.tiny import make_tiny_model

pytestmark = pytest.mark.exhaustive

SIZES = {
    "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 1, "vocab_size": 320,
}  # fmt: skip
# Triton's interpreter serves one thread at a time: who waits for others lets them.
_TURN = Lock()


class InTurn(OnBoard):
    """As ``OnBoard``, between ranks that take turns."""

    @override
    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        _TURN.release()
        try:
            return super().gather(own, within_s)
        finally:
            _TURN.acquire()


def means(dtype: Dtype, find: Finder | None = None) -> TargetMeans:
    """Our kernels for GPUs, with weights as these are in ``dtype``; numbers of rows are float32, if not bfloat16."""

    def pack(model: torch.nn.Module, config: TargetConfig) -> Choice:
        fill_vectors()
        gpu_choice.put(model, "triton", torch.device("cpu"), gpu_choice.maker_of("triton", dtype), dtype)
        return Choice(linears="triton")

    return TargetMeans(attention=GpuAttention(refusal=lambda *_: ""), pack=pack, find=lambda _: find)


def parts_of(
    folder: Path,
    ranks: int,
    order: list[int] | None = None,
    dtype: Dtype = "float32",
    *,
    rounded: bool = False,
    cache: KVCacheDtype = "auto",
    find: Finder | None = None,
) -> list[ModelSlice]:
    """The ranks, of weights in ``dtype``; rows are bfloat16 if ``rounded``. ``find``: as in ``TargetMeans``, of a pass."""
    config = TargetConfig(
        model_path=str(folder),
        kv_cache_tokens=256,
        max_model_len=128,
        threads=1,
        tensor_parallel_size=ranks,
        weights="float32",
        kv_cache_dtype=cache,
    )
    config = replace(config, dtype="bfloat16") if rounded else config
    board, parts = Board(ranks), []
    for rank in range(ranks):
        # It tries itself.
        with hopper():
            part = ModelSlice(config, 0, means=means(dtype, find), rank=rank)
        if part.shards is not None:
            part.shards.connect(InTurn(board, rank, order))
        parts.append(part)
    return parts


def together(parts: list[ModelSlice], run: Callable[[ModelSlice], torch.Tensor]) -> list[torch.Tensor]:
    def in_turn(part: ModelSlice) -> torch.Tensor:
        with _TURN:
            return run(part)

    with hopper(), ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(in_turn, parts))


def passes(part: ModelSlice) -> torch.Tensor:
    """A prompt and another request, a tree beside a plain row, and what follows the path that is kept."""
    part.pool.assign("a", [2, 0], 2)
    part.pool.assign("b", [1], 1)
    text = tuple(at * 37 % 320 for at in range(30))
    made = [part.run([Rows(request_id="a", context=0, tokens=text[:20], logits=2)], None)]
    made.append(part.run([Rows(request_id="b", context=0, tokens=text[5:8], logits=3)], None))
    tree = Rows(request_id="a", context=20, tokens=(9, 1, 2, 3, 4, 5), parents=(-1, -1, 1, 2, 0), logits=6)
    made.append(part.run([Rows(request_id="b", context=3, tokens=(7,), logits=1), tree], None))
    part.pool.move("a", [22, 23], 21)
    made.append(part.run([Rows(request_id="a", context=23, tokens=(6,), logits=1)], None))
    part.pool.clear()
    return torch.cat(made)


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "llama":
        return make_tiny_model(tmp_path, **SIZES)
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(Qwen3Config(**SIZES, max_position_embeddings=512, pad_token_id=0, initializer_range=0.3))
    made.save_pretrained(tmp_path)
    return tmp_path


def test_the_same_bits_from_any_number_of_ranks(model: Path) -> None:
    """Of four, two share a key head."""
    (whole,) = together(parts_of(model, 1), passes)
    for ranks in (2, 4):
        parts = parts_of(model, ranks)
        for part in parts:
            (layer,) = part.model.get_decoder().layers
            assert isinstance(layer.forward, RowDecoderLayer) and isinstance(layer.mlp, RowFeedForward)
            assert isinstance(layer.mlp.down_proj, ShardedLinear)
        assert all(torch.equal(made, whole) for made in together(parts, passes))
    swapped = together(parts_of(model, 2, order=[1, 0]), passes)
    assert not any(torch.equal(made, whole) for made in swapped)


def test_the_same_bits_from_three_ranks(tmp_path: Path) -> None:
    """Sizes are shared evenly, by no power of two."""
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 384,
    }
    folder = make_tiny_model(tmp_path, **{**SIZES, **sizes})
    (whole,) = together(parts_of(folder, 1), passes)
    assert all(torch.equal(made, whole) for made in together(parts_of(folder, 3), passes))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_weights_of_eight_bits_have_the_same_bits_from_any_number_of_ranks(tmp_path: Path, dtype: Dtype) -> None:
    folder = make_tiny_model(tmp_path, **SIZES)
    (whole,) = together(parts_of(folder, 1, dtype=dtype), passes)
    parts = parts_of(folder, 2, dtype=dtype)
    for part in parts:
        (layer,) = part.model.get_decoder().layers
        assert isinstance(layer.forward, RowDecoderLayer) and isinstance(layer.mlp.down_proj.own, ByteLinear)
        assert isinstance(part.model.lm_head.own, ByteLinear)
    assert all(torch.equal(made, whole) for made in together(parts, passes))
    (floats,) = together(parts_of(folder, 1), passes)
    assert not torch.equal(whole, floats) and torch.allclose(whole, floats, atol=0.2 * float(floats.abs().max()))


# Of each a layer: SiLU gates within a product; the same under other names; clamped gates beside ups, biases, and sinks of
# heads; shared experts, latent attention and a dense layer before.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 64, "sliding_window": None},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 64, "layer_types": ["full_attention"]},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def mixture(folder: Path, kind: str, **others: int) -> Path:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_experts_per_tok": 2, "max_position_embeddings": 512, "pad_token_id": 0, "initializer_range": 0.3}
    made = AutoConfig.for_model(kind, **{**sizes, **MIXTURES[kind], **others})
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return folder


EIGHT = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 384,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_same_bits_from_eight_ranks(kind: str, tmp_path: Path) -> None:
    """As many as a machine has: each has a head, of which two share one of keys, and of experts 16 columns."""
    if kind == "llama":
        folder = make_tiny_model(tmp_path, **{**SIZES, **EIGHT})
    else:
        folder = mixture(tmp_path, kind, **EIGHT, moe_intermediate_size=128)
    (whole,) = together(parts_of(folder, 1), passes)
    parts = parts_of(folder, 8)
    assert {part.pool.keys[0].shape[1] for part in parts} == {1}
    assert all(isinstance(part.model.get_decoder().layers[0].forward, RowDecoderLayer) for part in parts)
    assert all(torch.equal(made, whole) for made in together(parts, passes))
    # The last two in each other's places.
    swapped = together(parts_of(folder, 8, order=[0, 1, 2, 3, 4, 5, 7, 6]), passes)
    assert not any(torch.equal(made, whole) for made in swapped)


def experts_of(part: ModelSlice) -> RowExperts:
    (found,) = [module for module in part.model.modules() if isinstance(module, RowExperts)]
    return found


class Swapped:
    """A fault: what two ranks make lies in the wrong order."""

    def __init__(self, shards: StageRanks) -> None:
        self._shards = shards

    def columns(self, own: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._shards.columns(own).chunk(2, -1)[::-1], -1)


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_have_the_same_bits_from_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """Each rank holds columns of all experts. Only what the experts make is in the wrong order at last."""
    folder = mixture(tmp_path, kind)
    (whole,) = together(parts_of(folder, 1), passes)
    for ranks in (2, 4) if kind == "gpt_oss" else (2,):
        parts = parts_of(folder, ranks)
        held = [(experts_of(part).up.columns, experts_of(part).down.columns) for part in parts]
        assert held == [(128 // ranks, 64 // ranks)] * ranks
        assert all(torch.equal(made, whole) for made in together(parts, passes))
    for part in parts:
        assert part.shards is not None
        experts_of(part).own._shards = Swapped(part.shards)  # type: ignore[assignment]
    if ranks == 2:
        assert not any(torch.equal(made, whole) for made in together(parts, passes))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_mixtures_of_fewer_bits_have_the_same_bits_from_any_number_of_ranks(kind: str, dtype: Dtype, tmp_path: Path) -> None:
    folder = mixture(tmp_path, kind)
    (whole,) = together(parts_of(folder, 1, dtype=dtype, rounded=True), passes)
    parts = parts_of(folder, 2, dtype=dtype, rounded=True)
    assert {isinstance(experts_of(part).up.held, ByteLinear) for part in parts} == {dtype != "bfloat16"}
    assert all(torch.equal(made, whole) for made in together(parts, passes))
