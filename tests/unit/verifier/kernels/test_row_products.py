"""Products, norms and gates in Triton: values against float64, and bits that do not depend on the other rows."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("triton")
from services.verifier.kernels.triton import row_products
from services.verifier.kernels.triton.row_layers import use_row_kernels
from services.verifier.kernels.triton.row_products import RowLinear, gated, leaf_of, normalise, parts_of, product_of
from tests.kernels.triton_interpreter import hopper, mma


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "terms", "bias"), [(70, 300, True), (24, 520, False), (64, 100, False)])
def test_a_row_of_a_product_has_the_same_bits_beside_any_others(
    columns: int, terms: int, bias: bool, dtype: torch.dtype
) -> None:
    weight, offset = numbers(columns, terms, dtype=dtype), numbers(columns, dtype=dtype) if bias else None
    rows = numbers(70, terms, dtype=dtype)
    linear = RowLinear(weight, offset)
    with hopper():
        many = linear(rows)
        few = linear(rows[:20])
        one = linear(rows[7])
    assert linear.leaf == 128
    assert torch.equal(many[:20], few)
    assert torch.equal(one, few[7])
    exact = functional.linear(rows.double(), weight.double(), None if offset is None else offset.double())
    assert torch.allclose(many.double(), exact, atol=1e-4, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_leaves_of_another_length_are_seen() -> None:
    weight, rows = numbers(64, 512), numbers(70, 512)
    few, many = RowLinear(weight), RowLinear(weight)
    many.leaf = 192
    with hopper():
        made, other = few(rows[:3]), many(rows)[:3]
    assert torch.allclose(made, other, atol=1e-4)
    assert not torch.equal(made, other)


def test_how_the_shapes_of_models_are_cut() -> None:
    """Leaves by the terms alone, of two products at least; enough programs to fill a GPU, or all leaves apart."""
    for columns, terms in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (16, 64), (1024, 8192)):
        leaf = leaf_of(terms)
        assert (leaf % 64 == 0 and leaf >= 128 and 7 * leaf < terms <= 8 * leaf) or terms < 1024
        for rows, blocks in ((1, 1), (64, 1), (65, 2), (128, 2)):
            parts = parts_of(columns, terms, rows)
            assert parts in (1, 2, 4, 8) and (blocks * parts * -(-columns // 64) >= 126 or terms <= 128)
    assert [parts_of(columns, 8192, 1) for columns in (28672, 8192, 4096, 2048, 1024)] == [1, 1, 2, 4, 8]
    assert [parts_of(4096, 4096, rows) for rows in (1, 64, 65, 1024)] == [2, 2, 1, 1]


def one_leaf(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What matrix units make of the terms of one leaf, from its first to its last, float32."""
    made = mma(rows.float().numpy(), weight.T.float().numpy(), np.zeros((len(rows), len(weight)), np.float32))
    return torch.from_numpy(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_a_binary_tree_of_eight_leaves_in_any_number_of_parts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition, in words of torch; a part of one, two, four or eight leaves gives the same bits."""
    rows, weight = numbers(3, 1000, dtype=dtype), numbers(40, 1000, dtype=dtype)
    made = []
    with hopper():
        sums = [one_leaf(rows[:, start : start + 128], weight[:, start : start + 128]) for start in range(0, 1000, 128)]
        for parts in (1, 2, 4, 8):
            monkeypatch.setattr(row_products, "parts_of", lambda *_, parts=parts: parts)
            made.append(RowLinear(weight)(rows))
    leaves = list(sums)
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
    assert all(torch.equal(one, sums[0].to(dtype)) for one in made)
    # Another order of the same leaves shows.
    assert not torch.equal(made[0], sum(leaves, torch.zeros(3, 40)).to(dtype)) or dtype == torch.bfloat16


def test_layers_without_a_kernel_are_named() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(8), "product": nn.Linear(8, 4), "table": nn.Embedding(3, 8)})
    assert use_row_kernels(model) == ["LayerNorm"]
    assert isinstance(model["product"], RowLinear) and model["product"].bias is not None


def test_tied_weights_stay_one_and_replaced_ones_go() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(8, 16), "head": nn.Linear(16, 8, bias=False)})
    model["head"].weight = model["table"].weight
    model["part"] = nn.ModuleDict({name: nn.Linear(16, 8, dtype=torch.float64) for name in ("q_proj", "k_proj", "v_proj")})
    old = weakref.ref(model["part"]["q_proj"])
    assert use_row_kernels(model.requires_grad_(False)) == []
    assert model["head"].weight is model["table"].weight
    assert sum(each.numel() for each in model.parameters()) == 8 * 16 + 3 * (8 * 16 + 8)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gates(dtype: torch.dtype) -> None:
    rows, residual, weight = numbers(6, 1100, dtype=dtype), numbers(6, 1100, dtype=dtype), numbers(1100, dtype=dtype)
    with hopper():
        made, summed = normalise(rows, residual, weight, 1e-5)
        alone, _ = normalise(rows[3:4], residual[3:4], weight, 1e-5)
        plain, same = normalise(rows, None, weight, 1e-5)
        gates = gated(rows)
        one = gated(rows[2])
    assert torch.equal(summed, rows + residual) and torch.equal(same, rows)
    assert torch.equal(made[3:4], alone) and torch.equal(gates[2], one)
    close = {"atol": 0.1, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    for found, whole in ((made, rows + residual), (plain, rows)):
        wide = whole.double()
        exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        assert torch.allclose(found.double(), exact, **close)
    first, second = rows.double().chunk(2, -1)
    assert torch.allclose(gates.double(), functional.silu(first) * second, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_reads_a_product_adds_its_parts_to_the_same_bits(dtype: torch.dtype) -> None:
    linear = RowLinear(numbers(48, 300, dtype=dtype), numbers(48, dtype=dtype))
    rows, residual, weight = numbers(5, 300, dtype=dtype), numbers(5, 48, dtype=dtype), numbers(48, dtype=dtype)
    both = RowLinear(numbers(60, 300, dtype=dtype))
    with hopper():
        product = product_of(linear, rows)
        made = normalise(product, residual, weight, 1e-5)
        expected = normalise(linear(rows), residual, weight, 1e-5)
        gates, plain = both.gated(rows), gated(both(rows))
    assert product.parts == 4
    assert all(map(torch.equal, made, expected))
    assert torch.equal(gates, plain)
    # An ordinary layer has no parts, and serves as well.
    assert product_of(nn.Linear(300, 48, dtype=dtype), rows).parts == 0


def test_a_product_that_gates_has_the_bits_of_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program per block of rows and columns, as where these fill a GPU."""
    monkeypatch.setattr(row_products, "_FILL", 1)
    both, rows = RowLinear(numbers(2 * 41, 300)), numbers(3, 300)
    with hopper():
        assert torch.equal(both.gated(rows), gated(both(rows)))
