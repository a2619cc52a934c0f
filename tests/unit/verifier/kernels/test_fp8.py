"""fp8 and int8 on GPUs: by our kernels where they run; what torchao is asked for elsewhere, and what it makes of weights."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from services.verifier.config import Dtype, TargetConfig, check_backends
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.gpu_choice import KernelContest, use_choice, use_gpu_kernels
from services.verifier.kernels.linears import quantize
from services.verifier.loading.memory import arithmetic_dtype
from services.verifier.loading.model_config import load_dtype
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

FP8 = TargetConfig(model_path="of the test", device="cuda", dtype="fp8")
BY_TORCH = replace(FP8, kernels="torch")
REFUSED = KernelContest(refusal=lambda device: "no C compiler")


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 20)).to(torch.bfloat16).requires_grad_(False)


def with_capability(monkeypatch: pytest.MonkeyPatch, *found: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)


def test_a_cpu_is_refused() -> None:
    with refuses(ConfigurationError, field="verifier.dtype", value="fp8", allowed="float32, bfloat16 or int8"):
        check_backends(TargetConfig(model_path="of the test", dtype="fp8"))
    check_backends(FP8)


def test_torchao_refuses_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability(monkeypatch, 8, 6)
    with refuses(ConfigurationError, field="verifier.dtype", value="fp8"):
        use_gpu_kernels(a_model(), BY_TORCH)


def test_torchao_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with refuses(ConfigurationError, field="verifier.dtype", value="fp8"):
        use_gpu_kernels(a_model(), BY_TORCH)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_our_kernels_serve_where_they_run_and_torchao_elsewhere(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from services.verifier.kernels.triton.byte_linear import ByteLinear

    asked = _recorded(monkeypatch)
    config, model = replace(FP8, dtype=dtype), a_model()
    chosen = use_gpu_kernels(a_model(), config, contest=REFUSED)
    assert (chosen.linears, chosen.reason, len(asked)) == ("torch", "no C compiler", 1)
    use_choice(model, config, Choice(linears="triton"))
    assert len(asked) == 1
    assert all(isinstance(layer, ByteLinear) for layer in model)


def test_kernels_that_are_not_exact_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _recorded(monkeypatch)
    use_choice(a_model(), FP8, Choice(linears="torch"))
    assert len(asked) == 1


def test_ranks_need_our_kernels() -> None:
    ranks = replace(FP8, tensor_parallel_size=2, kernels="triton", attention_backend="triton")
    check_backends(ranks)
    check_backends(replace(ranks, dtype="int8"))
    with refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=2, allowed="int8 or fp8"):
        check_backends(replace(ranks, kernels="torch"))
    with refuses(ConfigurationError, field="verifier.tensor_parallel_size", value=2, says="no C compiler"):
        use_gpu_kernels(a_model(), replace(ranks, kernels="auto"), contest=REFUSED)


class Rounded(torch.Tensor):
    """Stands for a weight of torchao's."""


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A torchao that quantises, as the real one, only layers of multiples of 16; gives what it was asked for."""
    asked: list[Any] = []

    def quantize_(model: nn.Module, form: Any) -> None:
        asked.append(form)
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and not any(size % 16 for size in layer.weight.shape):
                layer.weight = nn.Parameter(layer.weight.data.as_subclass(Rounded), requires_grad=False)

    torchao = ModuleType("torchao.quantization")
    names = {
        "quantize_": quantize_, "PerRow": lambda: "by row", "Int8WeightOnlyConfig": lambda: "int8",
        "Float8DynamicActivationFloat8WeightConfig": lambda granularity: ("fp8", granularity),
    }  # fmt: skip
    for name, value in names.items():
        monkeypatch.setattr(torchao, name, value, raising=False)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", torchao)
    with_capability(monkeypatch, 8, 9)
    return asked


def test_rows_have_scales_of_their_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = _recorded(monkeypatch)
    with caplog.at_level(logging.INFO):
        quantize(a_model(), FP8)
    assert asked == [("fp8", "by row")] and "these layers stay bfloat16: 1" in caplog.text
    assert load_dtype(FP8) == arithmetic_dtype(FP8) == torch.bfloat16


def test_what_torchao_makes_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it quantises where it is told that a GPU is there; it multiplies in fp8 only on one."""
    pytest.importorskip("torchao")
    from torchao.float8 import inference
    from torchao.quantization import quant_api

    with_capability(monkeypatch, 9, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (inference, quant_api):
        monkeypatch.setattr(module, "is_sm_at_least_89", lambda: True)
    model, before = a_model(), a_model()
    quantize(model, FP8)
    made, weight = model[0].weight, before[0].weight.float()  # type: ignore[index]
    assert made.qdata.dtype == torch.float8_e4m3fn and tuple(made.scale.shape) == (48, 1)
    # Three bits behind the leading one; below 2^-6 of the largest number, 448 at most, steps stay the same.
    error = (made.dequantize().float() - weight).abs()
    assert (error <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 * 2**-9).all() and error.max() > 0
    assert type(model[1].weight.data) is torch.Tensor  # type: ignore[index]
