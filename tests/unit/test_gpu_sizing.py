"""What models would take of GPUs on paper, and the page that says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cli.plan_command import sized, sizes_object, split
from cluster.checks.gpu_sizing import GPUS, sentence, size_up, split_sentence, splits_of
from cluster.settings.config import load
from services.verifier.config import Dtype, TargetConfig
from services.verifier.loading.memory import Shape
from services.verifier.loading.model_size import shape_of
from speculation.errors import ConfigurationError
from tests.refusals import refuses

# Of Llama 3.1: width, width of the feed-forward part, layers, heads.
MODELS = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}
HEAD = ["model", "GPUs", "weights", "cache", "graphs, CUDA", "left", "ms", "ms, 64", "tokens/s"]
Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(name: str) -> Path:
        width, intermediate, layers, heads = MODELS[name]
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "dtype": "bfloat16",
            "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        }  # fmt: skip
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return made


def config_of(folder: Path) -> TargetConfig:
    return TargetConfig(model_path=str(folder), dtype="bfloat16", device="cuda", kv_cache_tokens=65536)


def sizing_row(config: TargetConfig, shape: Shape, count: int, name: str) -> list[str]:
    """One row of the table of plans: GPUs, memory of the fullest in GB, passes in ms; or why not."""
    try:
        found = size_up(replace(config, stages=count), shape, GPUS[name])
    except ConfigurationError as error:
        return [f"{count} x {name}", str(error).partition("; ")[2]]
    numbers = (found.weights / 1e9, found.cache / 1e9, found.graphs / 1e9, found.free / 1e9)
    times = (1e3 * found.step_s, 1e3 * found.many_s)
    return [
        f"{count} x {name}", *(f"{each:.1f}" for each in (*numbers, *times)), f"{1 / found.step_s:.0f}",
    ]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_the_tables_of_the_page(make: Make, dtype: Dtype) -> None:
    """To make one anew: copy what the failing assertion shows."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for name in MODELS:
        config = replace(config_of(make(name)), dtype=dtype)
        shape = shape_of(config)
        for count in (1, 2, 8):
            row = [name, *sizing_row(config, shape, count, "H100")]
            lines.append(f"| {' | '.join([*row, *[''] * (len(HEAD) - len(row))])} |")
    assert "\n".join(lines) in Path("docs/gpus.md").read_text(), "\n" + "\n".join(lines)


SPLIT_HEAD = ["model", "dtype", "GPUs", "ranks x stages", "left", "ms", "ms, 64", "tokens/s", "by stages alone"]
SPLITS: list[tuple[str, Dtype, int, str]] = [
    ("8B", "bfloat16", 1, "H100"), ("8B", "bfloat16", 4, "H100"), ("70B", "bfloat16", 4, "H100"), ("70B", "bfloat16", 8, "A100"),
    ("70B", "bfloat16", 8, "H20"), ("70B", "bfloat16", 8, "H100"), ("70B", "bfloat16", 8, "B200"),
    ("70B", "bfloat16", 8, "L40S"), ("70B", "fp8", 8, "H100"), ("405B", "fp8", 8, "H100"), ("405B", "fp8", 8, "B200"),
    ("405B", "bfloat16", 16, "H100"),
]  # fmt: skip


def splits_row(make: Make, name: str, dtype: Dtype, count: int, kind: str) -> list[str]:
    config = replace(config_of(make(name)), dtype=dtype)
    sizes = json.loads((make(name) / "config.json").read_text())
    splits = splits_of(config, shape_of(config), GPUS[kind], count, sizes)
    best, alone = splits[0], next((each for each in splits if each.ranks == 1), None)
    numbers = (best.plan.free / 1e9, 1e3 * best.plan.step_s, 1e3 * best.plan.many_s)
    by_stages = "" if alone is None else f"{1 / alone.plan.step_s:.0f}"
    return [
        name, dtype, f"{count} x {kind}", f"{best.ranks} x {best.stages}", *(f"{each:.1f}" for each in numbers),
        f"{1 / best.plan.step_s:.0f}", by_stages,
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_the_table_of_ranks_on_the_page(make: Make) -> None:
    """To make one anew: copy what the failing assertion shows."""
    lines = [f"| {' | '.join(SPLIT_HEAD)} |", "|---" * len(SPLIT_HEAD) + "|"]
    lines += [f"| {' | '.join(splits_row(make, *each))} |" for each in SPLITS]
    assert "\n".join(lines) in Path("docs/gpus.md").read_text(), "\n" + "\n".join(lines)


def test_ranks_are_planned_beside_stages(make: Make) -> None:
    settings = load(None, [f"model={make('70B')}", "verifier.dtype=bfloat16", "verifier.kv_cache_tokens=65536"])
    splits = split(settings, "8xH100")
    assert [(each.ranks, each.stages) for each in splits] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    best = splits[0].plan
    # An eighth of 139 GB at the datasheet's bandwidth, and four gathers of 5 us in each of 80 layers.
    assert best.step_s == pytest.approx(139e9 / 8 / 3.35e12 + 80 * 4 * 5e-6, rel=0.02)
    # What 64 rows exchange takes its time, too: 53 kB of each in a layer, in bfloat16 106.
    assert best.many_s - best.step_s == pytest.approx(80 * 63 * 2 * 53248 / 3.7e11, rel=0.01)
    assert "as 8 ranks (verifier.tensor_parallel_size, on CPUs alone so far)" in split_sentence(splits)
    assert split_sentence(splits).endswith("tokens/s for one request instead of 24")
    assert sizes_object(settings, "8xH100")["splits"][0]["ranks"] == 8
    # 64 heads have no equal shares for three.
    assert [each.ranks for each in split(settings, "3xH100")] == [1] and split_sentence(split(settings, "3xH100")) == ""
    assert split(settings, "16xH100")[0].stages == 2


def test_what_a_plan_says(make: Make) -> None:
    folder = make("8B")
    settings = load(None, [f"model={folder}", "verifier.dtype=bfloat16", "verifier.kv_cache_tokens=65536"])
    found, count, kind = sized(settings, "2xh100")
    assert (count, kind) == (2, "H100")
    # 8.03 billion parameters, those of the embeddings in both stages; 7.5 billion are read in every pass.
    assert found.weights == pytest.approx(9.08e9, rel=0.01)
    assert found.step_s == pytest.approx(15.0e9 / 3.35e12, rel=0.01)
    assert found.weights + found.cache + found.graphs + found.free == pytest.approx(80e9)
    assert sentence(found, count, kind).startswith(
        "2 x H100, on paper: 9.1 GB of weights, 4.3 of cache (65,536 tokens), 4.1 of graphs"
    )
    assert sizes_object(settings, "2xH100")["step_s"] == found.step_s
    halved, _, _ = sized(load(None, [f"model={folder}", "verifier.dtype=fp8", "verifier.kv_cache_tokens=65536"]), "2xH100")
    assert halved.step_s == pytest.approx(found.step_s / 2) and halved.cache == found.cache
    # Embeddings stay in bfloat16.
    table = 2 * 128256 * 4096
    assert halved.weights == pytest.approx((found.weights + table) / 2)
    whole, _, _ = sized(load(None, [f"model={folder}", "verifier.dtype=int8", "verifier.kv_cache_tokens=65536"]), "2xH100")
    # Room for the output layer's copy; a byte read, two written and two read for each weight.
    assert whole.weights == pytest.approx(halved.weights + table) and whole.step_s == pytest.approx(5 * halved.step_s)
    split_in_two, shape = replace(config_of(folder), stages=2), shape_of(config_of(folder))
    alone, beside = (size_up(split_in_two, shape, GPUS["H100"], drafters=drafters) for drafters in (0.0, 5e9))
    assert beside.free == pytest.approx(alone.free - 5e9) and "5.0 of drafters" in sentence(beside, 2, "H100")


@pytest.mark.parametrize(
    ("model", "gpus", "settings", "refusal"),
    [
        ("70B", "1xH100", [], ("model", None, "one of these would fit: stages: 3")),
        ("70B", "2xH100", [], ("model", None, "fit: kv_cache_tokens: 8192; dtype: int8; dtype: fp8; stages: 3, on other")),
        (
            "70B",
            "2xA100",
            [],
            ("model", None, "fit: kv_cache_tokens: 8192; dtype: int8; stages: 3, on other machines or GPUs"),
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
            ("model", None, "one of these would fit: dtype: int8; dtype: fp8; stages: 13, on other machines or GPUs"),
        ),
        ("8B", "2xB100", [], ("--gpus", "2xB100")),
        ("8B", "0xH100", [], ("--gpus", "0xH100")),
        ("8B", "2xH100", ["verifier.stages=3"], ("verifier.stages", 3)),
        ("8B", "40xH100", [], ("verifier.stages", 40)),
        (
            "8B",
            "1xA100",
            ["verifier.dtype=fp8"],
            ("verifier.dtype", "fp8"),
        ),
    ],
)
def test_what_is_refused(make: Make, model: str, gpus: str, settings: list[str], refusal: tuple[object, ...]) -> None:
    given = [f"model={make(model)}", "verifier.dtype=bfloat16", "verifier.kv_cache_tokens=65536", *settings]
    with refuses(ConfigurationError, *refusal):
        sized(load(None, given), gpus)


def test_the_card_says_how_many_tokens_the_cache_holds(make: Make) -> None:
    """Nine tenths of 80 GB, less what all else takes; a share of it is what a setting says."""
    chosen = [f"model={make('8B')}", "verifier.dtype=bfloat16", "verifier.max_model_len=8192"]
    found, count, kind = sized(load(None, chosen), "1xH100")
    token = 2 * 32 * 8 * (128 + 128 + 1)
    assert found.cache == pytest.approx(found.cache_tokens * token, rel=0.01)
    assert found.weights + found.cache + found.graphs == pytest.approx(0.9 * 80e9, rel=0.001)
    assert f"({found.cache_tokens:,} tokens)" in sentence(found, count, kind)
    assert sizes_object(load(None, chosen), "1xH100")["cache_tokens"] == found.cache_tokens
    half, _, _ = sized(load(None, [*chosen, "verifier.gpu_memory_utilization=0.45"]), "1xH100")
    assert found.cache - half.cache == pytest.approx(36e9, rel=0.001)
    with refuses(ConfigurationError, "model", None, "one of these would fit"):
        sized(load(None, [*chosen, "verifier.gpu_memory_utilization=0.2"]), "1xH100")
