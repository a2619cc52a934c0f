"""Activations over any number of numbers: torch's, and the same bits whatever is beside a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from services.verifier.kernels.whole_vectors import fill_vectors

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda given: functional.gelu(given, approximate="tanh"),
    "softplus": lambda given: functional.softplus(given, beta=1.5, threshold=8.0),
    "mish": functional.mish,
    "elu": lambda given: functional.elu(given, 0.7),
    "pow": lambda given: given.abs().pow(1.3),
}


@pytest.fixture(params=[1, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.examples(5)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("width", [1, 6, 100, 1000])
def test_a_row_has_the_same_bits_among_any_others(threads: int, function: Function, width: int) -> None:
    fill_vectors()
    rows = torch.randn(150, 2 * width)
    # As halves of gate and up come: with gaps between the rows.
    for given in (rows, rows[:, :width]):
        made = function(given)
        for count in (1, 2, 3, 17, 97):
            for start in (0, 5, 50):
                assert torch.equal(function(given[start : start + count]), made[start : start + count]), (count, start)


# The same by functions that are not replaced.
FORMULAS: dict[str, Function] = {
    "sigmoid": lambda given: 1 / (1 + (-given).exp()),
    "silu": lambda given: given / (1 + (-given).exp()),
    "gelu": lambda given: given * (1 + (given / 2**0.5).erf()) / 2,
    "gelu tanh": lambda given: given * (1 + ((2 / torch.pi) ** 0.5 * (given + 0.044715 * given * given * given)).tanh()) / 2,
    "softplus": lambda given: torch.where(1.5 * given > 8, given, (1.5 * given).exp().log1p() / 1.5),
    "mish": lambda given: given * given.exp().log1p().tanh(),
    "elu": lambda given: torch.where(given > 0, given, 0.7 * given.expm1()),
    "pow": lambda given: (given.abs().log() * 1.3).exp(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_compute_what_they_should(name: str, dtype: torch.dtype) -> None:
    fill_vectors()
    given = torch.linspace(-12, 12, 101, dtype=torch.float64).view(1, 101, 1).to(dtype)
    made = FUNCTIONS[name](given)
    assert (made.dtype, made.shape) == (dtype, given.shape)
    allowed = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(made.double(), FORMULAS[name](given.double()), atol=allowed, rtol=allowed)
    assert FUNCTIONS[name](given[:0]).shape == (0, 101, 1)


def test_gradients_and_odd_arguments() -> None:
    fill_vectors()
    given = torch.randn(7, 3, requires_grad=True)
    functional.silu(given).sum().backward()
    sigmoid = 1 / (1 + (-given.detach()).exp())
    torch.testing.assert_close(given.grad, sigmoid * (1 + given.detach() * (1 - sigmoid)))
    assert torch.equal(torch.sigmoid(torch.tensor([0, 0, 0])), torch.full((3,), 0.5))
    assert torch.sigmoid(torch.tensor(0.0)).shape == ()
    assert torch.equal(torch.tensor([2, 3]).pow(2), torch.tensor([4, 9]))
    assert torch.equal(torch.tensor([2.0, 3.0]) ** 2, torch.tensor([4.0, 9.0]))
    assert torch.tensor([2, 3]).pow(0.5).dtype == torch.float32
    assert torch.sigmoid(torch.tensor([torch.nan, torch.inf])).isnan().tolist() == [True, False]
