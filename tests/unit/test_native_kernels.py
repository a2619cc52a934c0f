"""What happens where the kernels cannot be compiled; what they compute is checked in tests/lossless."""

from __future__ import annotations

import pytest
import torch

from services.verifier import linears
from services.verifier.native.library import library
from services.verifier.native.linear import NativeLinear


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C compiler found"), ("false", "false failed")])
def test_without_a_compiler_torch_does_it(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert library.__wrapped__() is None
    assert reason in caplog.text
    monkeypatch.setattr(linears, "library", lambda: None)
    best = linears.best_linear()
    assert best is None or best[0] is linears.OneDnnLinear


@pytest.mark.parametrize("shape", [(32, 16), (50, 7), (1, 64), (300, 100)])
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 40])
def test_linear_layers_of_any_shape(shape: tuple[int, int], rows: int) -> None:
    kernels = library()
    if kernels is None:
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    weight, bias, given = torch.randn(*shape), torch.randn(shape[0]), torch.randn(3, rows, shape[1])
    layer = NativeLinear(kernels, weight, bias)
    result = layer(given)
    assert torch.allclose(result, given @ weight.T + bias, atol=1e-4)
    assert torch.equal(layer(given[1:2, -1:]), result[1:2, -1:])
