"""A target whose layers are split over ranks: the same bits as in one process, for any number of ranks and stages."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cluster.models.target import resolve
from services.model_files.weights.files import WeightFiles, quantize_folder
from services.model_files.weights.stored_blocks import StoredBlocks
from services.verifier.attention.calls import TILE
from services.verifier.config import TargetConfig, check_backends
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.loading import cut_layers
from services.verifier.model import fused_layers
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.stages.stage_ranks import StageRanks
from speculation.errors import ConfigurationError, TargetLost
from tests.engine.stage_forks import forked_stages, launch_fork, services_fork
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import test_stages as whole_target
from tests.running.refusals import refuses
from tests.servers.service import pipeline
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.tiny_gguf import Q4_K_M, WIDE, make_tiny_gguf

pytestmark = [
    needs_kernels,
    # One process, since they count the processes that they start.
    pytest.mark.xdist_group("stages"),
]

# Eight ranks have a head each, of which two share a key head.
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 320,
    "num_hidden_layers": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)


def config(model: Path, ranks: int = 1, **options: object) -> TargetConfig:
    return TargetConfig(
        model_path=str(model), kv_cache_tokens=1024, max_model_len=512, threads=1,
        tensor_parallel_size=ranks, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def passes(part: ModelSlice) -> torch.Tensor:
    """Two prompts, a chunk, two trees, what is kept of them, and what follows."""
    a = tuple(range(5, 75))
    part.pool.assign("a", [3, 1, 2], 3)
    part.pool.assign("b", [0, 4], 2)

    def rows(name: str, context: int, tokens: Sequence[int], parents: Sequence[int] = (), logits: int = 1) -> Rows:
        return Rows(request_id=name, context=context, tokens=tuple(tokens), parents=tuple(parents), logits=logits)

    made = [part.run([rows("a", 0, a[:40]), rows("b", 0, range(90, 30, -1))], None), part.run([rows("a", 40, a[40:])], None)]
    tree = rows("a", 70, (9, 1, 2, 3, 4), (-1, -1, 1, 2), 5)
    made.append(part.run([tree, rows("b", 60, (3, 8, *range(1, 8)), (-1, -1, *range(1, 7)), 9)], None))
    part.pool.move("a", [72, 73], 71)
    part.pool.move("b", range(62, 68), 61)
    assert TILE == 64, "rows of b move over a border of blocks"
    made.append(part.run([rows("a", 73, (6,)), rows("b", 67, (6,))], None))
    part.pool.clear()
    return torch.cat(made)


@pytest.fixture(scope="module")
def whole(model: Path) -> torch.Tensor:
    return passes(ModelSlice(config(model), 0))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_same_bits_from_any_number_of_ranks(model: Path, whole: torch.Tensor, ranks: int) -> None:
    parts = ranks_of(config(model, ranks))
    assert all(torch.equal(made, whole) for made in together(parts, passes))
    assert {part.pool.keys[0].shape[1] for part in parts} == {max(1, 4 // ranks)}
    assert {part.model.get_input_embeddings().own.num_embeddings for part in parts} == {320 // ranks}
    # Whole layers in our kernels, as in one process: modules would round in another way.
    layers = [layer for part in parts for layer in part.model.get_decoder().layers]
    assert all(isinstance(layer.forward, FusedLayer) for layer in layers)


def test_the_same_bits_from_three_ranks(tmp_path: Path) -> None:
    """Sizes are shared evenly, by no power of two."""
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 321,
    }
    folder = make_tiny_model(tmp_path, **sizes)
    alone = passes(ModelSlice(config(folder), 0))
    assert all(torch.equal(made, alone) for made in together(ranks_of(config(folder, 3)), passes))


def test_a_fault_of_our_own_is_no_reason_to_do_without_a_kernel(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object, **__: object) -> FusedLayer:
        raise AttributeError("a name that is misspelt")

    monkeypatch.setattr(fused_layers, "FusedLayer", faulty)
    with pytest.raises(AttributeError, match="misspelt"):
        ModelSlice(config(model), 0)


KINDS: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, object]]] = {
    "norms of heads, heads wider than the rows": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "biases of queries, keys and values": (Qwen2ForCausalLM, Qwen2Config, {}),
    "an output layer of its own, modules for the gate": (
        LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "a window": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
}  # fmt: skip


MIXTURES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, object]]] = {
    "experts apart in the files, and a dense layer": (
        Qwen3MoeForCausalLM, Qwen3MoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32, "mlp_only_layers": [1]},
    ),
    "experts under other names": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gates beside ups, biases, and sinks of heads": (
        GptOssForCausalLM, GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 24},
    ),
    "shared experts, and latent attention": (
        DeepseekV3ForCausalLM, DeepseekV3Config,
        {
            "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64, "head_dim": 8,
            "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "num_key_value_heads": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip


@pytest.mark.examples(2)
@pytest.mark.parametrize("kind", MIXTURES)
def test_the_same_bits_of_mixtures(kind: str, tmp_path: Path) -> None:
    """Every rank holds columns of all experts, and reads no others."""
    made, configured, others = MIXTURES[kind]
    torch.manual_seed(0)
    sizes = {**SIZES, "max_position_embeddings": 512, "pad_token_id": 0, "initializer_range": 0.2, **others}
    made(configured(**sizes)).save_pretrained(tmp_path)
    alone = passes(ModelSlice(config(tmp_path), 0))
    for ranks in (2, 4):
        assert all(torch.equal(one, alone) for one in together(ranks_of(config(tmp_path, ranks)), passes))
    swapped = together(ranks_of(config(tmp_path, 2), at=[1, 0]), passes)
    assert not any(torch.equal(one, alone) for one in swapped)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_for_other_models(kind: str, tmp_path: Path) -> None:
    made, configured, others = KINDS[kind]
    torch.manual_seed(0)
    made(configured(**{**SIZES, "max_position_embeddings": 512, "pad_token_id": 0, **others})).save_pretrained(tmp_path)
    alone = passes(ModelSlice(config(tmp_path), 0))
    assert all(torch.equal(one, alone) for one in together(ranks_of(config(tmp_path, 2)), passes))


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"weights": "as_stored"}], ids=str)
def test_the_same_bits_of_weights_in_fewer_bits(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    stored = tmp_path / "halves"
    LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(stored)
    alone = passes(ModelSlice(config(stored, **options), 0))
    assert all(torch.equal(one, alone) for one in together(ranks_of(config(stored, 4, **options)), passes))


def test_a_folder_of_blocks_is_read_by_slices(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "blocks"))
    quantize_folder(folder)
    with WeightFiles(folder) as files:
        name = "model.layers.0.mlp.down_proj.weight"
        assert files.shape(name) == (128, 256)
        part = files.part(name, 32, 96)
        assert isinstance(part, StoredBlocks) and torch.equal(part.float(), files.numbers(name)[32:96])
    alone = passes(ModelSlice(config(folder), 0))
    assert all(torch.equal(one, alone) for one in together(ranks_of(config(folder, 2)), passes))


def test_blocks_of_256_inputs_are_cut_by_outputs(tmp_path: Path) -> None:
    folder = resolve(str(make_tiny_gguf(tmp_path, Q4_K_M, **WIDE)), tmp_path / "cache").path
    alone = passes(ModelSlice(config(folder), 0))
    assert all(torch.equal(one, alone) for one in together(ranks_of(config(folder, 2)), passes))


FAULTS = {
    "a gather in the wrong order": {"order": [1, 0]},
    "shards swapped": {"at": [1, 0]},
    "a rank one pass behind": {"late": 1},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(model: Path, whole: torch.Tensor, fault: str) -> None:
    parts = ranks_of(config(model, 2), **FAULTS[fault])  # type: ignore[arg-type]
    assert not any(torch.equal(made, whole) for made in together(parts, passes))


def test_ranks_that_are_asked_for_different_passes_notice(model: Path) -> None:
    first, second = ranks_of(config(model, 2))

    def run(part: ModelSlice) -> str:
        part.pool.assign("a", [0], 1)
        token = 5 if part is first else 6
        with pytest.raises(TargetLost) as lost:
            part.run([Rows(request_id="a", context=0, tokens=(token,), logits=1)], None)
        return str(lost.value)

    assert together([first, second], run) == ["the ranks of a stage of the target disagree on what is to be computed"] * 2


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {}),
        (16, {}),
        (2, {"dtype": "bfloat16"}),
        (2, {"kernels": "onednn"}),
        (2, {"attention_backend": "torch"}),
        (2, {"device": "cuda"}),
        (2, {"device": "cuda", "dtype": "bfloat16", "kernels": "torch", "attention_backend": "triton"}),
        (2, {"device": "cuda", "dtype": "bfloat16", "kernels": "triton"}),
        (2, {"device": "cuda", "dtype": "fp8", "kernels": "torch", "attention_backend": "triton"}),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused_by_name(model: Path, ranks: int, options: dict[str, Any]) -> None:
    with refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=ranks) as refused:
        wanted = config(model, ranks, **options)
        check_backends(wanted)
        ModelSlice(wanted, 0)
    assert "1 there" in str(refused.value) if options else "one of 1, 2, 4, 8" in str(refused.value)


def test_what_gpus_take() -> None:
    for kernels in ("auto", "triton", "cublaslt"):
        on_gpu = {"device": "cuda", "dtype": "bfloat16", "kernels": kernels, "attention_backend": "triton"}
        check_backends(config(Path(), 8, **on_gpu))


@pytest.mark.parametrize(
    "kind", [(Olmo2ForCausalLM, Olmo2Config), (PersimmonForCausalLM, PersimmonConfig)], ids=["olmo2", "persimmon"]
)
def test_other_models_are_refused_by_name(kind: tuple[Any, Any], tmp_path: Path) -> None:
    """OLMo 2 has norms over all heads, Persimmon products under other names."""
    made, configured = kind
    made(configured(**SIZES, max_position_embeddings=512, pad_token_id=0)).save_pretrained(tmp_path)
    with refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=2):
        ModelSlice(config(tmp_path, 2), 0)


def test_sizes_that_the_configuration_does_not_name_are_refused_where_they_are_cut() -> None:
    skeleton = nn.Module()
    skeleton.up_proj = nn.Linear(16, 30, device="meta")
    with refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=4):
        cut_layers._cut(skeleton, "up_proj", "model.layers.0.mlp.up_proj", StageRanks(0, 4), None)


@pytest.fixture
def target(model: Path) -> Iterator[TransformersTarget]:
    """Two ranks in two processes, one of them this one."""
    made = TransformersTarget(config(model, 2, pass_timeout_s=2.0), launch_fork)
    yield made
    made.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2), (4, 1), (8, 1)])
def test_the_same_bits_from_ranks_in_processes(model: Path, ranks: int, stages: int) -> None:
    alone = whole_target.passes(TransformersTarget(config(model)))
    made = TransformersTarget(config(model, ranks, stages=stages), launch_fork)
    try:
        assert torch.equal(whole_target.passes(made), alone) and made.exact
        made.beat()
    finally:
        made.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_rank_that_is_gone_comes_back(model: Path, target: TransformersTarget, fault: signal.Signals) -> None:
    alone = whole_target.passes(TransformersTarget(config(model)))
    assert target.open("a", 100)
    target.forward([Rows(request_id="a", context=0, tokens=(1, 2, 3), logits=1)])
    target.keep("a", 0, [0, 1, 2])
    os.kill(forked_stages()[-1].pid, fault)
    with pytest.raises(TargetLost, match="rank 0 of stage 0"):
        target.forward([Rows(request_id="a", context=3, tokens=(4,), logits=1)])
    target.recover()
    assert torch.equal(whole_target.passes(target), alone)


@pytest.mark.exhaustive
def test_a_pass_that_fails_in_every_rank_is_no_end(model: Path, target: TransformersTarget) -> None:
    alone = whole_target.passes(TransformersTarget(config(model)))
    target.open("a", 100)
    with pytest.raises(TargetLost):
        target.forward([Rows(request_id="a", context=0, tokens=(10**6,), logits=1)])
    target.recover()
    assert torch.equal(whole_target.passes(target), alone)


@pytest.mark.exhaustive
async def test_every_answer_is_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, under every strategy of texts, by two ranks; so an answer may move from one to the other."""
    services_fork(monkeypatch)
    wanted, made = {}, {}
    async with pipeline(model) as running:
        arithmetic = running.verifier.loop.identity.arithmetic
        for number in range(3):
            wanted[number] = await whole_target.ask(running, "autoregressive", number, temperature=float(number % 2))
    async with pipeline(model, "verifier.tensor_parallel_size=2") as running:
        assert running.verifier.loop.identity.arithmetic == arithmetic
        for strategy in ("auto", "blend", "suffix", "autoregressive"):
            for number in range(3):
                made[number] = await whole_target.ask(running, strategy, number, temperature=float(number % 2))
            assert made == wanted, strategy
