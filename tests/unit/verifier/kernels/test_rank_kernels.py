"""Kernels that ranks share layers by: those whose columns do not depend on what is beside them, and the same in all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from services.verifier.config import TargetConfig
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.gpu_choice import Settle, alone, choose_gpu_kernels
from services.verifier.kernels.shard_check import ShardedProduct, compared_rows, sharded_products
from services.verifier.loading.load_model import load_layers
from services.verifier.stages.exchange import Meeting, attend_meeting
from services.verifier.stages.settling import follow, keep_settled, settle
from services.verifier.stages.stage_ranks import StageRanks
from speculation.errors import ConfigurationError, TargetLost
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.unit.verifier.kernels.test_gpu_kernels import Candidates, RoundedOnce

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "num_hidden_layers": 2,
}  # fmt: skip


class ByWidth(nn.Module):
    """A planted fault: sums are cut in layers of few columns, as a product's kernel may choose by its shape. Rows are exact."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        half = weight.shape[1] // 2
        parts = [slice(0, half), slice(half, None)] if len(weight) < 160 else [slice(0, None)]
        self.layers = [(part, weight[:, part].float()) for part in parts]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        made = [torch.stack([(own * row).sum(-1) for row in rows.float()[..., part]]) for part, own in self.layers]
        return made[0] if len(made) == 1 else made[0] + made[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)


def config(folder: Path, **options: object) -> TargetConfig:
    """As on a GPU; what is computed here is computed on the CPU."""
    return TargetConfig(
        model_path=str(folder), dtype="bfloat16", tensor_parallel_size=2, max_model_len=64, kv_cache_tokens=128,
        attention_backend="triton", **options,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[nn.Module]:
    return [load_layers(config(folder), range(2), StageRanks(rank, 2)) for rank in range(2)]


def chosen(
    model: nn.Module, wanted: TargetConfig, cublaslt: Callable[..., nn.Module], ms: float = 1.0, settled: Settle = alone
) -> Choice:
    """The choice where cuBLASLt takes so long, and our kernels two milliseconds."""
    candidates = Candidates({"cublaslt": ms, "triton": 2.0, "torch": 0.5}, cublaslt=cublaslt)
    return choose_gpu_kernels(model, wanted, candidates.time, candidates.contest(), settled)


def test_which_products_are_compared(ranks: list[nn.Module]) -> None:
    """Those of both layers once: queries, keys and values; what the heads make; gate and up; down; the output layer."""
    assert sharded_products(ranks[1]) == [
        ShardedProduct(64, tuple((whole, (range(whole // 2, whole),)) for whole in parts), False)
        for parts in ((64, 32, 32), (64,), (96, 96))
    ] + [
        ShardedProduct(96, ((64, (range(32, 64),)),), False),
        ShardedProduct(64, ((320, (range(160, 320),)),), False),
    ]
    joint = sharded_products(ranks[0])[0]
    assert joint.outputs == 128 and joint.held == [*range(32), *range(64, 80), *range(96, 112)]
    assert sharded_products(nn.Sequential(nn.Linear(4, 4))) == []


def test_every_captured_size_is_compared_and_prompts(folder: Path) -> None:
    counts = compared_rows(config(folder))
    assert {1, 2, 4, 8, 24, 64, 80, 128, 160, 512, 2048} <= set(counts) and counts == sorted(set(counts))


def test_cublaslt_serves_ranks_whose_shards_are_exact(ranks: list[nn.Module], folder: Path) -> None:
    for wanted in ("auto", "cublaslt"):
        assert chosen(ranks[0], config(folder, kernels=wanted), RoundedOnce).linears == "cublaslt"


def test_shards_with_other_bits_are_noticed_at_every_start(ranks: list[nn.Module], folder: Path, tmp_path: Path) -> None:
    """Also where measurements of an earlier start are kept; a model that is whole may still be computed so."""
    kept = config(folder, kernels_dir=tmp_path)
    assert chosen(ranks[0], kept, RoundedOnce).linears == "cublaslt"
    found = chosen(ranks[0], kept, ByWidth)
    assert found.linears == "triton" and "than the whole product's (96 of 192 columns, of 64 terms" in found.reason
    with refuses(ConfigurationError, field="verifier.kernels", value="cublaslt", says="whole product's"):
        chosen(ranks[0], config(folder, kernels="cublaslt"), ByWidth)
    whole = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    assert chosen(whole, replace(config(folder), tensor_parallel_size=1), ByWidth).linears == "cublaslt"


def test_a_bias_is_compared_too() -> None:
    from services.verifier.kernels.shard_check import unequal_shard

    def shifted(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        """A fault: the bias is rounded where there are few columns."""
        assert bias is not None
        own = bias.float() if len(weight) > 40 else bias.float() * 1.01

        class Made(nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                made: torch.Tensor = RoundedOnce(weight, None)(rows) + own
                return made

        return Made()

    product = ShardedProduct(16, ((64, (range(32),)),), True)
    assert unequal_shard([product], shifted, [3], torch.device("cpu"))
    assert not unequal_shard([ShardedProduct(16, ((64, (range(48),)),), True)], shifted, [3], torch.device("cpu"))


class Together:
    """The two processes of a target settle: the verifier, and another in a thread."""

    def __init__(self) -> None:
        self.meeting = Meeting("127.0.0.1")
        self.threads = ThreadPoolExecutor(1)

    def other(self, run: Callable[[Settle], Choice]) -> Future[Choice]:
        return self.threads.submit(run, partial(follow, self.meeting.host, self.meeting.port, 0))

    def verifier(self, alive: bool = True) -> Settle:
        return partial(settle, self.meeting.store, 2, 2, lambda _: alive)


@pytest.fixture
def pair() -> Iterator[Together]:
    made = Together()
    yield made
    made.threads.shutdown()


@pytest.mark.parametrize(
    ("of_other", "own", "expected"), [(1.9, 1.0, "cublaslt"), (9.0, 1.0, "triton"), (0.9, 9.0, "triton")]
)
def test_all_processes_take_what_is_fastest_for_all(
    ranks: list[nn.Module], folder: Path, pair: Together, of_other: float, own: float, expected: str
) -> None:
    other = pair.other(lambda settled: chosen(ranks[0], config(folder), RoundedOnce, of_other, settled))
    mine = chosen(ranks[1], config(folder), RoundedOnce, own, pair.verifier())
    assert (mine.linears, other.result().linears) == (expected, expected)


def test_what_is_not_exact_in_one_process_serves_none(ranks: list[nn.Module], folder: Path, pair: Together) -> None:
    other = pair.other(lambda settled: chosen(ranks[0], config(folder), ByWidth, 0.1, settled))
    mine = chosen(ranks[1], config(folder), RoundedOnce, 0.1, pair.verifier())
    assert (mine.linears, other.result().linears) == ("triton", "triton")


def test_a_process_started_anew_takes_what_was_settled(ranks: list[nn.Module], folder: Path, pair: Together) -> None:
    """However fast others were there; unless they are not exact there."""
    keep_settled(pair.meeting.store, "cublaslt")
    assert (
        pair.other(lambda settled: chosen(ranks[0], config(folder), RoundedOnce, 99.0, settled)).result().linears
        == "cublaslt"
    )
    with refuses(ConfigurationError, field="verifier.kernels", says="cublaslt is not exact here"):
        pair.other(lambda settled: chosen(ranks[0], config(folder), ByWidth, 0.1, settled)).result()


def test_one_that_refuses_or_dies_is_not_waited_for(pair: Together) -> None:
    with pytest.raises(TargetLost, match="rank 0 of stage 0 has died"):
        pair.verifier(alive=False)("{}", lambda told: "torch")
    attend_meeting(pair.meeting.host, pair.meeting.port, 0, 2, refusal="no C compiler")
    with refuses(ConfigurationError, field="rank 0 of stage 0"):
        pair.verifier()("{}", lambda told: "torch")
