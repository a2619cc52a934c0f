"""Rounding of what enters a product, in Triton: the bits of ``InputRounding`` in float32, whatever else is rounded beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from services.model_files.weights.rounded_inputs import InputRounding, round_by, round_inputs, unrounded
from services.verifier.kernels import gpu_choice
from services.verifier.kernels.triton.rounded_rows import rounded_rows
from services.verifier.kernels.triton.row_layers import use_row_kernels
from services.verifier.kernels.triton.row_products import RowLinear
from tests.kernels.triton_interpreter import hopper
from tests.unit.verifier.kernels.test_rounding_kernel import KINDS, between_codes, reach_of

WIDTH = 1120


def given(kind: str) -> torch.Tensor:
    """Rows of all sizes, of zeros, of one sign, and between codes; several programs' lanes wide."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(WIDTH, generator=generator) * 10.0**power for power in range(-38, 30, 8)]
    rows += [torch.zeros(WIDTH), torch.full((WIDTH,), -3.0), torch.full((WIDTH,), 1e-42), torch.full((WIDTH,), -1e-44)]
    rows += [torch.linspace(-1, 7, WIDTH), torch.linspace(2, 9, WIDTH)]
    reach = reach_of(KINDS[kind])
    parts = between_codes().clamp(-reach, reach).split(15)
    ends = [torch.cat([part, torch.full((16 - len(part),), reach)]) for part in parts]
    ends += [ends[0]] * (-len(ends) % (WIDTH // 16))
    return torch.stack(rows + list(torch.cat(ends).view(-1, WIDTH)))


@pytest.mark.examples(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_rounds_to_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    rounding, rows = KINDS[kind], given(kind).to(dtype)
    with hopper():
        made = rounded_rows(rounding, rows)
        alone = rounded_rows(rounding, rows[4])
    assert made.dtype == dtype and torch.equal(made, rounding.in_float32(rows))
    assert torch.equal(made[4], alone)
    if dtype == torch.float32:
        assert torch.equal(made, rounding(rows))


def test_other_roundings_show() -> None:
    rows = given("whole")
    with hopper():
        made = rounded_rows(InputRounding(), rows)
    for other in (InputRounding(symmetric=False), InputRounding(size=32), InputRounding(floats=True)):
        assert not torch.equal(made, other.in_float32(rows))
    # As vLLM divides.
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    assert not torch.equal(made, (rows / scale).round() * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_stays_none(kind: str) -> None:
    rows = torch.ones(1, 32)
    rows[0, 3] = float("nan")
    with hopper():
        assert rounded_rows(KINDS[kind], rows).isnan().sum() == 1


def a_model(kind: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = {name: nn.Linear(96, 64, bias=False, dtype=torch.bfloat16) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    model = nn.ModuleDict({"part": nn.ModuleDict(layers)}).requires_grad_(False)
    round_inputs(model, {f"part.{name}": KINDS[kind] for name in layers}, [("q_proj", "k_proj", "v_proj")])
    return model


@pytest.mark.parametrize("kind", ["whole", "zeros", "floats, parts", "floats, stored", "four bits", "floats, powers"])
def test_products_behind_it_are_those_of_rounded_rows(kind: str) -> None:
    """In bfloat16: what is rounded becomes bfloat16, and is multiplied as ever."""
    model, rows = a_model(kind), torch.randn(20, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = {name: RowLinear(layer.after_rounding.weight) for name, layer in model["part"].items()}
    assert use_row_kernels(model) == []
    entered = KINDS[kind].in_float32(rows)
    assert not torch.equal(entered, rows)
    with hopper():
        for name, layer in model["part"].items():
            made = layer(rows)
            assert torch.equal(made, plain[name](entered))
            assert torch.equal(made[3:5], layer(rows[3:5].clone()))
        with unrounded(model):
            assert torch.equal(model["part"]["o_proj"](rows), plain["o_proj"](rows))


def test_layers_of_torch_round_in_float32() -> None:
    """As our kernel does; in the type of the rows the numbers would be others."""
    model, rows = a_model("whole"), torch.randn(20, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer = model["part"]["o_proj"]
    before = layer.inputs(rows)
    gpu_choice.put(model, "torch", torch.device("cpu"))
    with hopper():
        assert torch.equal(layer.inputs(rows), rounded_rows(InputRounding(), rows))
    assert not torch.equal(before, layer.inputs(rows))


def test_a_scale_of_all_rows_is_seen() -> None:
    """A fault: what shares a pass would change a row."""
    model, rows = a_model("whole"), torch.randn(20, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    use_row_kernels(model)
    round_by(model, lambda how, given: replace(how, size=None).in_float32(given.reshape(1, -1)).reshape(given.shape))
    layer = model["part"]["o_proj"]
    with hopper():
        assert not torch.equal(layer(rows)[3:5], layer(rows[3:5].clone()))
