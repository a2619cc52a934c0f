"""What models would take of GPUs on paper, and the page that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cli.plan_command import sizes_object, split
from cluster.checks.gpu_sizing import GPUS, GpuPlan, GpuSplit, reasons, sentence, size_up, splits_of
from cluster.settings.config import load
from services.verifier.config import Dtype, TargetConfig
from services.verifier.loading.memory import Shape
from services.verifier.loading.model_size import shape_of
from services.verifier.recurrence.room import launched_places
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

# Of Llama 3.1: width, width of the feed-forward part, layers, heads.
MODELS = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}
# Mixtures of experts; the last one's layers have states as well.
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
        "num_local_experts": 128, "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    # All else is its class's default.
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 163840,
    },
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "max_position_embeddings": 262144,
    },
}  # fmt: skip
Make = Callable[[str], Path]


def dense(width: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(name: str) -> Path:
        config = MIXTURES.get(name) or dense(*MODELS[name])
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        return folder

    return made


def config_of(folder: Path) -> TargetConfig:
    return TargetConfig(model_path=str(folder), dtype="bfloat16", device="cuda", kv_cache_tokens=65536)


HEAD = [
    "model", "dtype", "GPUs", "ranks x stages", "weights", "cache", "tokens of cache", "states", "ms", "ms, 64",
    "tokens/s, one", "tokens/s, 64 each", "one, by stages alone", "instead, for many",
]  # fmt: skip
ROWS: list[tuple[str, Dtype, int, str]] = [
    ("8B", "bfloat16", 1, "H100"), ("8B", "bfloat16", 2, "H100"), ("8B", "bfloat16", 8, "H100"), ("8B", "fp8", 1, "H100"),
    ("8B", "bfloat16", 2, "L40S"), ("70B", "bfloat16", 1, "H100"), ("70B", "bfloat16", 4, "H100"), ("70B", "bfloat16", 8, "A100"),
    ("70B", "bfloat16", 8, "L40S"), ("70B", "bfloat16", 8, "H20"), ("70B", "bfloat16", 8, "H100"), ("70B", "bfloat16", 8, "B200"),
    ("70B", "fp8", 8, "H100"), ("405B", "bfloat16", 8, "H100"), ("405B", "bfloat16", 8, "B200"),
    ("405B", "bfloat16", 16, "H100"), ("405B", "fp8", 8, "H100"), ("Qwen3-30B-A3B", "bfloat16", 1, "H100"),
    ("Qwen3-30B-A3B", "bfloat16", 8, "H100"), ("gpt-oss-120b", "bfloat16", 8, "H100"), ("DeepSeek-V3", "fp8", 8, "H200"),
    ("Qwen3-Next-80B-A3B", "bfloat16", 4, "H100"),
]  # fmt: skip
# Of the columns, those that a page for readers with eight GPUs shows, and of which GPUs.
OF_EIGHT = (0, 1, 2, 3, 6, 10, 11, 12)
EIGHT = ("8 x H100", "8 x H200", "8 x B200")


@cache
def shape_at(folder: str, dtype: Dtype) -> Shape:
    """Of a model on any GPUs."""
    return shape_of(TargetConfig(model_path=folder, dtype=dtype, device="cuda"))


def table_row(make: Make, name: str, dtype: Dtype, count: int, kind: str) -> list[str]:
    """What is chosen, in GB of the fullest GPU, ms and tokens per second; or why nothing is."""
    config = TargetConfig(model_path=str(make(name)), dtype=dtype, device="cuda")
    sizes = json.loads((make(name) / "config.json").read_text())
    try:
        splits = splits_of(config, shape_at(config.model_path, dtype), GPUS[kind], count, sizes)
    except ConfigurationError as error:
        return [name, dtype, f"{count} x {kind}", str(error).partition("; ")[2]]
    best, alone = splits[0], next((each for each in splits if each.ranks == each.replicas == 1), None)
    plan, most = best.plan, max(splits, key=lambda each: each.many)
    of = f"{best.replicas} of " if best.replicas > 1 else ""
    return [
        name, dtype, f"{count} x {kind}", f"{of}{best.ranks} x {best.stages}", f"{plan.weights / 1e9:.1f}", f"{plan.cache / 1e9:.1f}",
        f"{plan.cache_tokens:,}", f"{plan.states / 1e9:.1f}" if plan.states else "", f"{1e3 * plan.step_s:.1f}", f"{1e3 * plan.many_s:.1f}", f"{best.one:.0f}",
        f"{best.many:,.0f}", "" if alone is None else f"{alone.one:.0f}", "" if most is best else f"{most}: {most.one:.0f}, {most.many:,.0f}",
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_the_tables_of_the_pages(make: Make) -> None:
    """To make them anew: copy what the failing assertions show."""
    rows = [table_row(make, *each) for each in ROWS]
    _check_table("docs/gpu-kernels.md", [HEAD, *[[*row, *[""] * (len(HEAD) - len(row))] for row in rows]])
    of_eight = [row for row in rows if row[2] in EIGHT and len(row) == len(HEAD)]
    _check_table("docs/gpus.md", [[row[at] for at in OF_EIGHT] for row in (HEAD, *of_eight)])


def _check_table(page: str, rows: list[list[str]]) -> None:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    lines = "\n".join([head, "|---" * len(rows[0]) + "|", *others])
    assert lines in Path(page).read_text(), "\n" + lines


@pytest.mark.exhaustive
def test_stages_and_ranks_are_chosen(make: Make) -> None:
    given = [f"model={make('70B')}", "verifier.dtype=bfloat16", "verifier.kv_cache_tokens=65536"]
    settings = load(None, given)
    splits, count, kind = split(settings, "8xH100")
    ways = [(each.replicas, each.ranks, each.stages) for each in splits]
    assert ways == [(1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2), (1, 2, 4), (2, 1, 4), (1, 1, 8)]
    best = splits[0].plan
    # An eighth of 139 GB at the datasheet's bandwidth, and four gathers of 5 us in each of 80 layers; those of embeddings,
    # which all give whole, and of logits besides.
    assert best.step_s == pytest.approx(139e9 / 8 / 3.35e12 + 80 * 4 * 5e-6, rel=0.02)
    numbers = 80 * 53248 + 8 * 8192 + 128256
    assert best.gather_s == pytest.approx((4 * 80 + 2) * 5e-6 + 2 * numbers / 3.7e11)
    # What 64 rows exchange takes its time, too: 53 kB of each in a layer, in bfloat16 106.
    assert best.many_s - best.step_s == pytest.approx(63 * 2 * numbers / 3.7e11, rel=0.01)
    assert sentence(splits[0], count, kind).startswith("8 x H100 as 8 ranks x 1 stage, on paper: 17.6 GB of weights")
    why, gathers, wanted = reasons(splits)
    # Stages are worth it where ranks cannot be.
    assert why.endswith(
        "tokens/s of one, and of 64 in each replica, by 8 ranks x 1 stage: 147 and 7,676, 2 replicas of 4 ranks x 1 stage: "
        "83 and 9,472"
    )
    assert "1.6 ms are the ranks' exchanges: 5 us each" in gathers
    assert wanted.startswith(
        "settings: verifier.device: cuda, verifier.tensor_parallel_size: 8, verifier.attention_backend: triton"
    )
    found = sizes_object(settings, "8xH100")
    assert (found["replicas"], found["ranks"], found["stages"]) == (1, 8, 1)
    # 64 heads have no equal shares for three; more than eight GPUs have no common fast link.
    assert [str(each) for each in split(settings, "3xH100")[0]] == ["1 rank x 3 stages"]
    assert str(split(settings, "16xH100")[0][0]) == "2 replicas of 8 ranks x 1 stage"
    halved = split(load(None, [*given, "verifier.dtype=fp8"]), "8xH100")[0]
    assert [each.ranks for each in halved if each.replicas == 1] == [8, 4, 2, 1]
    # What the settings say is not chosen anew.
    said = load(None, [*given, "verifier.stages=2", "verifier.tensor_parallel_size=4"])
    assert [str(each) for each in split(said, "8xH100")[0]] == ["4 ranks x 2 stages"]
    assert [str(each) for each in split(said, "16xH100")[0]] == ["2 replicas of 4 ranks x 2 stages"]
    said = load(None, [*given, "verifier.replicas=2"])
    assert [str(each) for each in split(said, "8xH100")[0]] == [
        f"2 replicas of {each}" for each in ("4 ranks x 1 stage", "2 ranks x 2 stages", "1 rank x 4 stages")
    ]
    # A model whose layers no code cuts has stages.
    folder = make("8B")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}))
    assert {each.ranks for each in split(load(None, [f"model={folder}", *given[1:]]), "2xH100")[0]} == {1}


def test_a_mixture_is_read_as_its_rows_choose(make: Make) -> None:
    """One row reads 3 of 30.5 billion parameters: what two ranks save in reading, their exchanges take."""
    given = [f"model={make('Qwen3-30B-A3B')}", "verifier.dtype=bfloat16", "verifier.kv_cache_tokens=16384"]
    splits, _, _ = split(load(None, given), "2xH100")
    copied, staged, shared = splits
    assert (staged.stages, shared.ranks) == (2, 2)
    always = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128) + 151936 * 2048
    experts = 48 * 128 * 3 * 768 * 2048
    # Both stages count embeddings and output layer.
    assert staged.plan.weights == pytest.approx(always + experts + 3 * 151936 * 2048, rel=1e-4)
    assert staged.plan.step_s == pytest.approx(2 * (always + experts / 16) / 3.35e12, rel=1e-4)
    assert staged.plan.many_s == pytest.approx(2 * (always + experts * (1 - (15 / 16) ** 64)) / 3.35e12, rel=1e-4)
    # Four gathers a layer: of 32 heads, of what is behind them, of 8 experts' columns, and of their sums.
    numbers = 48 * (4096 + 2048 + 8 * 768 + 2048) + 2 * 2048 + 151936
    assert shared.plan.gather_s == pytest.approx((4 * 48 + 2) * 5e-6 + 2 * numbers / 3.7e11)
    # The router is read by each of them.
    router = 48 * 2048 * 128
    halved = 2 * ((always + experts / 16 - router) / 2 + router) / 3.35e12
    assert shared.plan.step_s - shared.plan.gather_s == pytest.approx(halved, rel=5e-4)
    # 64 rows read nearly all experts, so that ranks are worth it more than stages; and copies more than both.
    assert 1.5 * shared.plan.many_s < staged.plan.many_s
    why, *_ = reasons(splits)
    assert why.endswith("by 2 replicas of one GPU: 551 and 7,206")
    assert copied.plan.step_s == pytest.approx(staged.plan.step_s)


def test_ranks_without_a_fast_link_are_warned_of(make: Make) -> None:
    settings = load(None, [f"model={make('8B')}", "verifier.dtype=bfloat16", "verifier.tensor_parallel_size=2"])
    for gpus, warned in (("2xL40S", True), ("2xH100", False)):
        splits, _, kind = split(settings, gpus)
        found = [line for line in reasons(splits, kind) if line.startswith(f"warning: {kind} have no fast link")]
        assert len(found) == warned
        share = 100 * splits[0].plan.gather_s / splits[0].plan.step_s
        assert not warned or f" are {share:.0f}% of a pass of one row" in found[0]


@pytest.mark.exhaustive
def test_states_are_said_apart(make: Make) -> None:
    given = [f"model={make('Qwen3-Next-80B-A3B')}", "verifier.dtype=bfloat16", "verifier.kv_cache_tokens=65536"]
    given += ["verifier.max_num_seqs=32", "verifier.max_batched_tokens=2048"]
    (only,), count, kind = split(load(None, given), "4xH100")
    # In each of 36 layers: a state for each of 32 requests, and each 512 tokens of the cache.
    held = 36 * 4 * (32 * 128 * 128 + 3 * 8192) * (32 + 128) / 4
    # What 512 rows were given, once for captured passes, and for those of three other stages.
    noted = 4 * 36 * 4 * 512 * (8192 + 8256) / 4
    branches = 4 * 32 * 128 * 128 * (64 + launched_places(32 * (1 + load(None, given).verifier.max_nodes) + 2048, 32))
    assert only.plan.states == pytest.approx(held + noted + branches, rel=1e-6)
    found = only.plan
    assert found.weights + found.cache + found.states + found.graphs + found.free == pytest.approx(80e9)
    assert f"{found.states / 1e9:.1f} of states of requests, prefixes and branches" in sentence(only, count, kind)
    with refuses(ConfigurationError, "model", None, "128 prefixes (verifier.mamba_block_size), 9.1 GiB of captured passes"):
        split(load(None, given), "1xH100")


def test_what_a_plan_says(make: Make) -> None:
    folder = make("8B")

    def stages(*further: str) -> GpuPlan:
        given = [f"model={folder}", "verifier.kv_cache_tokens=65536", "verifier.stages=2", *further]
        (only,), _, _ = split(load(None, given), "2xH100")
        return only.plan

    found = stages("verifier.dtype=bfloat16")
    # 8.03 billion parameters, those of the embeddings in both stages; 7.5 billion are read in every pass.
    assert found.weights == pytest.approx(9.08e9, rel=0.01)
    assert found.step_s == pytest.approx(15.0e9 / 3.35e12, rel=0.01) and found.gather_s == 0
    assert found.weights + found.cache + found.graphs + found.free == pytest.approx(80e9)
    halved = stages("verifier.dtype=fp8")
    assert halved.step_s == pytest.approx(found.step_s / 2) and halved.cache == found.cache
    # Embeddings stay in bfloat16.
    table = 2 * 128256 * 4096
    assert halved.weights == pytest.approx((found.weights + table) / 2)
    ours = stages("verifier.dtype=int8")
    assert (ours.weights, ours.step_s) == (halved.weights, halved.step_s)
    whole = stages("verifier.dtype=int8", "verifier.kernels=torch")
    # By torchao: room for the output layer's copy; a byte read, two written and two read for each weight.
    assert whole.weights == pytest.approx(halved.weights + table) and whole.step_s == pytest.approx(5 * halved.step_s)
    split_in_two, shape = replace(config_of(folder), stages=2), shape_of(config_of(folder))
    alone, beside = (size_up(split_in_two, shape, GPUS["H100"], drafters=drafters) for drafters in (0.0, 5e9))
    assert beside.free == pytest.approx(alone.free - 5e9)
    assert "5.0 of drafters" in sentence(GpuSplit(ranks=1, stages=2, plan=beside), 2, "H100")


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    ("model", "gpus", "settings", "refusal"),
    [
        ("70B", "1xH100", [], ("model", None, "one of these would fit: verifier.stages: 3")),
        (
            "70B",
            "2xH100",
            [],
            ("model", None, "fit: verifier.kv_cache_tokens: 8192; verifier.dtype: int8; verifier.dtype: fp8; verifier.s"),
        ),
        (
            "70B",
            "2xA100",
            [],
            ("model", None, "verifier.dtype: int8; verifier.dtype: fp8; verifier.stages: 3, on other machines or GPUs"),
        ),
        (
            "70B",
            "1xH100",
            ["verifier.dtype=fp8"],
            ("model", None, "66.7 GiB of weights (fp8)"),
        ),
        (
            "405B",
            "8xH100",
            [],
            ("model", None, "would fit: verifier.dtype: int8; verifier.dtype: fp8; verifier.stages: 14, on other machines"),
        ),
        ("8B", "2xB100", [], ("--gpus", "2xB100")),
        ("8B", "0xH100", [], ("--gpus", "0xH100")),
        pytest.param("8B", "9" * 5000 + "xH100", [], ("--gpus", None, "a number, x and one of"), id="digits"),
        ("8B", "2xH100", ["verifier.stages=3"], ("verifier.stages", 3)),
        ("8B", "74xH100", ["verifier.replicas=2"], ("--gpus", 74)),
        ("8B", "8xH100", ["verifier.stages=3"], ("verifier.stages", 3, "it must divide 8")),
        ("8B", "8xH100", ["verifier.replicas=3"], ("verifier.replicas", 3)),
        ("8B", "8xH100", ["verifier.replicas=2", "verifier.stages=2"], ("verifier.stages", 2, "it must be 4")),
        ("8B", "3xH100", ["verifier.tensor_parallel_size=3"], ("verifier.tensor_parallel_size", 3)),
        (
            "8B",
            "1xA100",
            ["verifier.dtype=fp8", "verifier.kernels=torch"],
            ("verifier.dtype", "fp8"),
        ),
    ],
)
def test_what_is_refused(make: Make, model: str, gpus: str, settings: list[str], refusal: tuple[object, ...]) -> None:
    given = [f"model={make(model)}", "verifier.dtype=bfloat16", "verifier.kv_cache_tokens=65536", *settings]
    with refuses(ConfigurationError, *refusal):
        split(load(None, given), gpus)


def test_the_card_says_how_many_tokens_the_cache_holds(make: Make) -> None:
    """Nine tenths of 80 GB, less what all else takes; a share of it is what a setting says."""
    chosen = [f"model={make('8B')}", "verifier.dtype=bfloat16", "verifier.max_model_len=8192"]
    (only,), count, kind = split(load(None, chosen), "1xH100")
    found, token = only.plan, 2 * 32 * 8 * (128 + 128 + 1)
    assert found.cache == pytest.approx(found.cache_tokens * token, rel=0.01)
    assert found.weights + found.cache + found.graphs == pytest.approx(0.9 * 80e9, rel=0.001)
    assert f"({found.cache_tokens:,} tokens)" in sentence(only, count, kind)
    assert sizes_object(load(None, chosen), "1xH100")["cache_tokens"] == found.cache_tokens
    half = split(load(None, [*chosen, "verifier.gpu_memory_utilization=0.45"]), "1xH100")[0][0].plan
    assert found.cache - half.cache == pytest.approx(36e9, rel=0.001)
    with refuses(ConfigurationError, "model", None, "one of these would fit"):
        split(load(None, [*chosen, "verifier.gpu_memory_utilization=0.2"]), "1xH100")
