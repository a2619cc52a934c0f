"""Weights of eight bits: what a byte stands for, what they round, and that rows and columns do not depend on others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("triton")
from services.verifier.kernels.triton.byte_linear import ByteLinear, ByteType
from services.verifier.kernels.triton.row_layers import use_row_kernels
from services.verifier.kernels.triton.row_products import RowLinear, gated, normalise, product_of
from tests.kernels.triton_interpreter import hopper

FORMS: tuple[ByteType, ...] = ("int8", "fp8")


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def meant(layer: ByteLinear, form: ByteType) -> torch.Tensor:
    """The weights that a layer's bytes and scales stand for, [outputs, inputs], float64; in words of torch."""
    pairs = layer.pairs.contiguous().view(torch.uint8).view(layer.out_features, -1, 32, 2)
    codes = pairs.transpose(2, 3).flatten(1)[:, : layer.in_features].contiguous()
    if form == "fp8":
        return codes.view(torch.float8_e4m3fn).double() * layer.scales[:, None].double()
    sign = torch.where(codes >= 0x80, -1.0, 1.0)
    return sign * (codes & 0x7F).double() * layer.scales[:, None].double() / 2**13


@pytest.mark.parametrize(("form", "codes"), [("int8", 128), ("fp8", 127)])
def test_every_byte_is_its_number(form: ByteType, codes: int) -> None:
    """All numbers of e4m3, normal ones and those below, and of int8: what the kernel makes of the identity."""
    every = torch.arange(codes, dtype=torch.uint8)
    exact = every.view(torch.float8_e4m3fn).float() if form == "fp8" else every.float()
    # The largest of a row is the largest of the form, so its scale is one.
    layer = ByteLinear(torch.stack([exact, -exact]), form=form)
    with hopper():
        made = layer(torch.eye(codes))
    assert torch.equal(made.T, torch.stack([exact, -exact]))


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_rounded_to_the_nearest_with_a_scale_for_each_output(form: ByteType) -> None:
    weight = numbers(70, 300) * torch.logspace(-6, 6, 70)[:, None].bfloat16()
    weight[3] = 0
    layer = ByteLinear(weight, form=form)
    made, largest = meant(layer, form), weight.double().abs().amax(1, keepdim=True)
    error = (made - weight.double()).abs()
    if form == "int8":
        # Half a step of 127, and float32's own rounding.
        assert (error <= largest / 127 / 2 * 1.0001).all()
    else:
        # Half a step of three bits; below 2^-6 of the largest steps stay the same.
        assert (error <= torch.maximum(weight.double().abs() / 16, largest / 448 * 2**-10) * 1.0001).all()
    assert error.max() > 0 and torch.equal(made[3], torch.zeros(300, dtype=torch.float64))
    held = sum(each.numel() * each.element_size() for each in layer.buffers())
    assert held == 70 * (320 + 4) and not list(layer.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_that_of_the_rounded_weights(form: ByteType) -> None:
    """A row has the same bits beside any others; the last leaf is not whole."""
    bias, rows = numbers(24), numbers(70, 300)
    layer = ByteLinear(numbers(24, 300), bias, form=form)
    exact = functional.linear(rows.double(), meant(layer, form), bias.double())
    with hopper():
        many = layer(rows)
        few = layer(rows[:20])
        one = layer(rows[7])
    assert torch.equal(many[:20], few) and torch.equal(one, few[7])
    assert torch.allclose(many.double(), exact, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_leaves_are_those_of_whole_weights(form: ByteType) -> None:
    """With scales that are powers of two, the very bits of a bfloat16 layer of the same numbers."""
    weight = (numbers(40, 500).float().clamp(-3, 3) * 32).round()
    weight = weight.to(torch.float8_e4m3fn).float() if form == "fp8" else weight
    weight[:, 0] = 127.0 if form == "int8" else 448.0
    rows = numbers(3, 500)
    with hopper():
        made, whole = ByteLinear(weight / 64, form=form)(rows), RowLinear((weight / 64).bfloat16())(rows)
    assert torch.equal(made, whole)


@pytest.mark.parametrize("form", FORMS)
def test_columns_do_not_depend_on_others(form: ByteType) -> None:
    """So a rank that holds some of them has their bits."""
    weight, rows = numbers(48, 150), numbers(5, 150)
    with hopper():
        whole = ByteLinear(weight, form=form)(rows)
        parts = [ByteLinear(weight[first : first + 16], form=form)(rows) for first in (0, 16, 32)]
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("form", FORMS)
def test_who_reads_a_product_and_gates_has_the_same_bits(form: ByteType, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, rows = ByteLinear(numbers(48, 300), numbers(48), form=form), numbers(5, 300)
    residual, weight, both = numbers(5, 48), numbers(48), ByteLinear(numbers(82, 300), form=form)
    with hopper():
        product = product_of(linear, rows)
        assert product.parts == 4
        read = normalise(product, residual, weight, 1e-5)
        finished = normalise(linear(rows), residual, weight, 1e-5)
        expected = gated(both(rows))
        monkeypatch.setattr("services.verifier.kernels.triton.row_products._FILL", 1)
        made = both.gated(rows)
    assert all(map(torch.equal, read, finished))
    assert torch.equal(made, expected)


def test_a_model_has_them_in_place_of_its_linear_layers() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(8, 16), "head": nn.Linear(16, 8, bias=False)})
    model["head"].weight = model["table"].weight
    assert use_row_kernels(model, lambda weight, bias: ByteLinear(weight, bias, form="fp8")) == []
    # The embeddings stay as they are.
    assert isinstance(model["head"], ByteLinear) and model["table"].weight.dtype == torch.float32
