"""Kernels for a GPU are chosen among the exact ones by what they take, put into the model, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("triton")
from cluster.models.target import before_products
from cluster.settings.config import load
from services.verifier.attention.calls import Call
from services.verifier.attention.on_gpu import GpuAttention, pool_and_buckets, refusal
from services.verifier.config import AttentionBackend, Dtype, Kernels, TargetConfig, check_backends
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.gpu_choice import (
    DEFINITION,
    KernelContest,
    choose_gpu_kernels,
    is_exact_layer,
    triton_refusal,
    use_gpu_kernels,
)
from services.verifier.kernels.padded_linear import PaddedLinear, forbid_split_sums
from services.verifier.kernels.shard_check import MakeLayer
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.service import arithmetic_of
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model

CPU = torch.device("cpu")
# As on a GPU; what is computed here is computed on the CPU.
ON_GPU = TargetConfig(model_path="of the test", device="cuda", dtype="bfloat16")


class Split(nn.Module):
    """Sums that are cut where there are many rows: a planted fault."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat, half = rows.float(), rows.shape[-1] // 2
        if len(rows) <= 16:
            return functional.linear(flat, self.weight.float())
        return functional.linear(flat[..., :half], self.weight[:, :half].float()) + functional.linear(
            flat[..., half:], self.weight[:, half:].float()
        )


class RoundedOnce(nn.Module):
    """Exact: sums of so few products of bfloat16 need no rounding in double precision, whatever their order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight.double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows.double(), self.weight).float()


class Candidates:
    """Candidates that are compared on the CPU, with Triton there; each takes its own time."""

    def __init__(self, milliseconds: dict[str, float], **makers: Callable[..., nn.Module]) -> None:
        self._milliseconds, self._makers = milliseconds, makers
        self._now = ""

    def contest(self, triton_version: str = "1") -> KernelContest:
        return KernelContest(
            refusal=lambda device: "",
            maker_of=self._maker_of,
            prepare=lambda: None,
            beyond_cache=0,
            triton_version=lambda: triton_version,
        )

    def time(self, run: Callable[[], object]) -> float:
        return self._milliseconds[self._now]

    def _maker_of(self, name: str, dtype: Dtype) -> MakeLayer:
        self._now = name
        return self._makers.get(name, RoundedOnce)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 32, bias=False, dtype=torch.bfloat16))


def test_the_fastest_exact_one_is_taken_and_kept(tmp_path: Path) -> None:
    config = replace(ON_GPU, device="cpu", kernels_dir=tmp_path)
    candidates = Candidates({"cublaslt": 2.0, "triton": 1.0, "torch": 0.5})
    chosen = choose_gpu_kernels(model(), config, candidates.time, candidates.contest())
    assert chosen.linears == "triton" and chosen.min_rows == 1
    assert chosen.reason == "ms over 1/16/64/256 rows: " + "; ".join(
        f"{name} {'/'.join([figure] * 4)}" for name, figure in (("cublaslt", "2.00"), ("triton", "1.00"), ("torch", "0.50"))
    )
    kept = choose_gpu_kernels(model(), config, lambda run: pytest.fail("it was measured"), candidates.contest())
    assert kept.linears == "triton"


def test_one_that_is_not_exact_is_not_taken_however_fast() -> None:
    config, milliseconds = replace(ON_GPU, device="cpu"), {"cublaslt": 2.0, "triton": 1.0, "torch": 0.5}
    candidates = Candidates(milliseconds, triton=Split)
    chosen = choose_gpu_kernels(model(), config, candidates.time, candidates.contest())
    assert chosen.linears == "cublaslt" and chosen.reason.endswith("not exact here: triton")
    candidates = Candidates(milliseconds, triton=Split, cublaslt=Split)
    assert choose_gpu_kernels(model(), config, candidates.time, candidates.contest()).linears == "torch"
    with refuses(ConfigurationError, field="verifier.kernels", value="triton"):
        choose_gpu_kernels(model(), replace(config, kernels="triton"), candidates.time, candidates.contest())


def test_another_release_of_triton_measures_anew(tmp_path: Path) -> None:
    config = replace(ON_GPU, device="cpu", kernels_dir=tmp_path)
    first = Candidates({"cublaslt": 2.0, "triton": 1.0, "torch": 0.5})
    assert choose_gpu_kernels(model(), config, first.time, first.contest()).linears == "triton"
    later = Candidates({"cublaslt": 1.0, "triton": 2.0, "torch": 0.5})
    assert choose_gpu_kernels(model(), config, later.time, later.contest()).linears == "triton"
    assert choose_gpu_kernels(model(), config, later.time, later.contest("another")).linears == "cublaslt"


def test_parts_of_sums_are_forbidden_by_name_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in names}
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        # Set, so that it is taken back afterwards.
        monkeypatch.setenv(variable, "as before")
    try:
        forbid_split_sums()
        assert not any(getattr(matmul, name) or getattr(matmul, f"{name}_split_k") for name in names)
    finally:
        for name, values in before.items():
            setattr(matmul, name, values)


@pytest.mark.parametrize(
    ("flags", "called"),
    [
        (("verifier.device=cuda", "verifier.dtype=bfloat16"), 1),
        (("verifier.device=cuda", "verifier.dtype=bfloat16", "verifier.kernels=cublaslt"), 1),
        (("verifier.device=cuda", "verifier.dtype=bfloat16", "verifier.kernels=triton"), 0),
        (("verifier.device=cuda", "verifier.dtype=int8"), 0),
        ((), 0),
    ],
)  # fmt: skip
def test_they_are_forbidden_before_a_draft_model_multiplies(flags: tuple[str, ...], called: int) -> None:
    noted: list[None] = []
    before_products(load(flags=flags, environ={}), forbid=lambda: noted.append(None))
    assert len(noted) == called


def test_a_split_sum_shows_and_padding_changes_no_number() -> None:
    weight = torch.randn(32, 200).bfloat16()
    assert is_exact_layer(RoundedOnce(weight, None), 200, CPU)
    assert not is_exact_layer(Split(weight, None), 200, CPU)
    padded, rows, bias = PaddedLinear(weight, weight[:, 0]), torch.randn(2, 3, 200).bfloat16(), weight[:, 0]
    assert padded(rows).shape == (2, 3, 32)
    assert torch.allclose(padded(rows).float(), functional.linear(rows, weight, bias).float(), atol=0.3)


@pytest.mark.parametrize(
    ("kernels", "dtype", "said"),
    [
        (
            "triton",
            "float32",
            "verifier.kernels is triton: verifier.dtype is float32: must be bfloat16, int8 or fp8; use auto or torch",
        ),
        ("cublaslt", "float32", "verifier.kernels is cublaslt: verifier.dtype is float32: must be bfloat16; use"),
        ("cublaslt", "fp8", "verifier.kernels is cublaslt: verifier.dtype is fp8: must be bfloat16; use auto or torch"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(kernels: Kernels, dtype: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        use_gpu_kernels(model(), replace(ON_GPU, kernels=kernels, dtype=dtype))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert use_gpu_kernels(model(), replace(ON_GPU, dtype="float32")).linears == "torch"


def test_triton_is_refused_without_it_and_on_old_gpus() -> None:
    def chosen(**given: Any) -> None:
        contest = KernelContest(refusal=partial(triton_refusal, **given))
        choose_gpu_kernels(model(), replace(ON_GPU, kernels="triton"), lambda run: 0.0, contest)

    with refuses(ConfigurationError, field="verifier.kernels", value="triton", says="the GPU's compute capability is 7.5"):
        chosen(capability_of=lambda _: (7, 5))
    with refuses(ConfigurationError, field="verifier.kernels", value="triton", says="triton is not installed"):
        chosen(find=lambda _: None)


@pytest.mark.parametrize(
    ("device", "kernels", "attention", "said"),
    [
        (
            "cpu",
            "triton",
            "auto",
            "verifier.kernels is triton, which is for a GPU, and verifier.device is cpu: must be one of",
        ),
        ("cuda:1", "avx2", "auto", "verifier.kernels is avx2, which is for a CPU, and verifier.device is cuda:1"),
        ("cpu", "auto", "triton", "verifier.attention_backend is triton, which needs a GPU, and verifier.device is cpu"),
    ],
)
def test_settings_that_are_not_for_the_device(device: str, kernels: Kernels, attention: AttentionBackend, said: str) -> None:
    config = TargetConfig(model_path="nowhere", device=device, kernels=kernels, attention_backend=attention)
    for check in (check_backends, TransformersTarget):
        with pytest.raises(ConfigurationError) as caught:
            check(config)
        assert str(caught.value).startswith(said)


def test_kernels_of_float32_are_refused_for_bfloat16() -> None:
    for kernels in ("auto", "torch"):
        check_backends(TargetConfig(model_path="nowhere", dtype="bfloat16", kernels=kernels))
    with refuses(ConfigurationError, field="verifier.kernels", value="avx2"):
        check_backends(TargetConfig(model_path="nowhere", dtype="bfloat16", kernels="avx2"))


def test_attention_that_is_named_is_used_or_refused() -> None:
    def pool(size: int, wanted: AttentionBackend, capability: tuple[int, int] = (9, 0)) -> bool:
        means = GpuAttention(
            refusal=partial(refusal, capability_of=lambda _: capability),
            trial=lambda *_: "RuntimeError: no C compiler",
            pool=lambda *_, **__: None,  # type: ignore[arg-type, return-value]
        )
        call = Call(entry=0, heads=2, kv_heads=1, key_size=size, value_size=size, scale=0.1)
        return pool_and_buckets([call], 64, torch.bfloat16, torch.device("cuda"), wanted, means)[1] is not None

    assert not pool(64, "torch") and not pool(8, "auto")
    for size, reason in ((8, "heads are 8 wide: must be from 16 to 256"), (64, "RuntimeError: no C compiler")):
        with refuses(ConfigurationError, "verifier.attention_backend", "triton", reason):
            pool(size, "triton")
    with refuses(
        ConfigurationError, "verifier.attention_backend", "triton", "compute capability is 7.0: needs 8.0 or later"
    ):
        pool(64, "triton", (7, 0))


def test_attention_by_torch_on_a_cpu(tmp_path: Path) -> None:
    """Named, it computes what our compiled kernel does, and the whole layers that the kernel would run stay apart."""
    make_tiny_model(tmp_path, num_hidden_layers=1, hidden_size=64, num_attention_heads=4)
    made = []
    for wanted in ("auto", "torch"):
        config = TargetConfig(
            model_path=str(tmp_path), kv_cache_tokens=256, max_model_len=128, attention_backend=wanted  # type: ignore[arg-type]
        )  # fmt: skip
        target = TransformersTarget(config)
        assert target.exact and (wanted == "auto" or target._part._layouts.kernel is None)
        assert target.open("one", 20)
        made += target.forward([Rows(request_id="one", context=0, tokens=tuple(range(9)), logits=9)])
        target.shutdown()
    assert torch.allclose(*made, atol=1e-4)


def test_an_answer_does_not_go_on_where_kernels_compute_by_another_definition() -> None:
    config = TargetConfig(model_path="nowhere", dtype="bfloat16", device="cuda")
    targets = [
        cast(TransformersTarget, SimpleNamespace(kernels=Choice(linears="triton"), device=torch.device(device), exact=True))
        for device in ("cuda", "cpu")
    ]
    before = [arithmetic_of(target, config, "weights") for target in targets]
    after = [arithmetic_of(target, config, "weights", DEFINITION + 1) for target in targets]
    assert before[0] != after[0] and before[1] == after[1]
