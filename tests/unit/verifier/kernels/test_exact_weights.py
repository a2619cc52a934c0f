"""Weights whose products are the same bits for a row whatever is beside it: whoever calls what on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from services.model_files.weights.quantised.as_blocks import floats_as_blocks
from services.model_files.weights.stacked_blocks import StackedBlocks
from services.model_files.weights.stored_blocks import quantized
from services.verifier.kernels.cpu_choice import Choice, maker
from services.verifier.kernels.exact_weights import ExactWeight, Numbers
from services.verifier.kernels.linears import OneDnnLinear
from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.linear_kernel import NativeLinear
from services.verifier.kernels.parameters import pack_parameters

EXPERTS, OUTPUTS, INPUTS = 3, 50, 70
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Of rows and a parameter, [experts, outputs, inputs].
CALLS: dict[str, Call] = {
    "linear": lambda rows, weight: functional.linear(rows, weight[1]),
    "linear with a bias": lambda rows, weight: functional.linear(rows, weight[1], torch.ones(OUTPUTS)),
    "by a tensor": lambda rows, weight: functional.linear(rows, weight[torch.tensor(2)]),
    "matmul": lambda rows, weight: rows @ weight[0].T,
    "mm": lambda rows, weight: torch.mm(rows, weight[0].t()),
    "method": lambda rows, weight: rows.matmul(weight[2].transpose(0, 1)),
    "one row": lambda rows, weight: rows[0] @ weight[0].T,
    "no rows": lambda rows, weight: rows[:0] @ weight[0].T,
    "batches of rows": lambda rows, weight: rows.view(2, -1, INPUTS) @ weight[0].mT,
    "addmm": lambda rows, weight: torch.addmm(torch.ones(OUTPUTS), rows, weight[0].T),
    "columns": lambda rows, weight: weight[1] @ rows.T,
    "one column": lambda rows, weight: weight[1] @ rows[0],
    "bmm": lambda rows, weight: torch.bmm(rows.expand(EXPERTS, -1, -1), weight.transpose(1, 2)),
    "baddbmm": lambda rows, weight: torch.baddbmm(
        torch.ones(EXPERTS, 1, OUTPUTS), rows.expand(EXPERTS, -1, -1), weight.transpose(1, 2)
    ),
    "matrices by columns of their own": lambda rows, weight: weight[:, None] @ rows.T.expand(EXPERTS, 1, -1, -1),
    "unbind": lambda rows, weight: functional.linear(rows, weight.unbind()[1]),
    "parts of a matrix": lambda rows, weight: functional.linear(rows, weight.view(-1, INPUTS).chunk(EXPERTS)[2]),
    "converted": lambda rows, weight: functional.linear(rows.float(), weight[0].type(torch.float32).to("cpu").float()),
}


@pytest.fixture(params=["native", "onednn"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and library() is None:
        pytest.skip("our kernels cannot be compiled here")
    chosen: str = request.param
    return chosen


def exact(weight: torch.Tensor, kind: str) -> ExactWeight:
    compiled = library()
    instructions = "" if compiled is None else compiled.name
    make = maker(Choice(linears=kind, instructions=instructions, weights="as_stored" if kind == "native" else "float32"))
    assert make is not None
    return ExactWeight.whole(Numbers(owner="Test", shape=weight.shape, stored=weight, make=make))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_products_are_those_of_plain_weights(kind: str, call: Call) -> None:
    plain = torch.randn(EXPERTS, OUTPUTS, INPUTS)
    weight = exact(plain, kind)
    rows = torch.randn(6, INPUTS)
    made = call(rows, weight)
    assert type(made) is torch.Tensor
    torch.testing.assert_close(made, call(rows, plain), atol=1e-4, rtol=1e-4)
    assert weight.numbers.stored is None and len(weight.numbers.packed) == EXPERTS
    assert not weight.numbers.inexact


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_number_of_rows(kind: str, transposed: bool, dtype: torch.dtype) -> None:
    shape = (EXPERTS, INPUTS, OUTPUTS) if transposed else (EXPERTS, OUTPUTS, INPUTS)
    plain = torch.randn(shape).to(dtype)
    weight = exact(plain, kind)
    rows = torch.randn(40, INPUTS)

    def product(given: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return given @ by[1] if transposed else functional.linear(given, by[1])

    made = product(rows, weight)
    torch.testing.assert_close(made, product(rows, plain.float()), atol=1e-4, rtol=1e-4)
    for count in (1, 2, 7, 33):
        assert torch.equal(product(rows[:count], weight), made[:count])
    # What was packed comes back as it was.
    assert torch.equal(weight.numbers.plain(), plain.float())


def test_what_is_not_multiplied_by_rows_is_what_it_was_and_is_told(kind: str) -> None:
    plain = torch.randn(EXPERTS, OUTPUTS, INPUTS)
    weight = exact(plain, kind)
    assert torch.equal(weight * 2, plain * 2)
    assert torch.equal(weight[torch.tensor([0, 2])], plain[[0, 2]])
    assert torch.equal(torch.cat([weight[0], weight[1]]), torch.cat([plain[0], plain[1]]))
    assert not weight.numbers.inexact
    rows = torch.randn(4, INPUTS)
    functional.linear(rows, weight[0])
    # A second form of the same numbers is multiplied as torch does it.
    half = weight[0][: OUTPUTS // 2]
    torch.testing.assert_close(functional.linear(rows, half), functional.linear(rows, plain[0][: OUTPUTS // 2]))
    assert weight.numbers.inexact == {"linear"}
    assert torch.equal(torch.einsum("ri,eoi->reo", rows, weight), torch.einsum("ri,eoi->reo", rows, plain))
    assert weight.numbers.inexact == {"linear", "einsum"}


@pytest.mark.parametrize("inputs_first", [False, True])
def test_experts_in_blocks(kind: str, inputs_first: bool) -> None:
    """Of several types, and one in numbers; multiplied in another form, they are numbers, too."""
    plain = torch.randn(4, 64, 64)
    matrices = (quantized(plain[0]), floats_as_blocks(plain[1].to(torch.float8_e4m3fn), torch.ones(64, 1), 64), plain[2])
    last = quantized(plain[3])
    blocks = StackedBlocks((*(one for one in matrices if one is not None), last), inputs_first)
    made, rows = blocks.float(), torch.randn(7, 64)
    packed, expanded = held(blocks, kind), exact(made, kind)
    for number in range(4):
        both = [one[number].T if inputs_first else one[number] for one in (packed, expanded)]
        assert torch.equal(*(functional.linear(rows, one) for one in both))
    assert packed.numbers.stored is None and not packed.numbers.inexact
    if kind == "native":
        assert [one.stored_as for one in packed.numbers.packed] == ["Q8_0", "E4M3", "float32", "Q8_0"]
    assert torch.equal(packed.numbers.plain(), made)
    other = held(blocks, kind)
    halves = other.view(-1, 64).chunk(8)[3]
    assert torch.equal(functional.linear(rows, halves), functional.linear(rows, exact(made, kind).view(-1, 64).chunk(8)[3]))
    assert torch.equal(held(blocks, kind) * 2, made * 2)
    parts = blocks.outputs([range(8), range(32, 40)])
    assert torch.equal(
        parts.float(), made[:, :, [*range(8), *range(32, 40)]] if inputs_first else made[:, [*range(8), *range(32, 40)]]
    )


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "Q8_0"])
def test_rows_of_several_matrices_in_one_call(kept: str, inputs_first: bool) -> None:
    """More rows than a kernel takes at once, none, and a few."""
    if library() is None:
        pytest.skip("our kernels cannot be compiled here")
    plain = torch.randn(EXPERTS, OUTPUTS, INPUTS)
    if kept == "Q8_0":
        weight = held(StackedBlocks(tuple(quantized(one) for one in plain), inputs_first), "native")
    else:
        weight = exact((plain.mT.contiguous() if inputs_first else plain).to(getattr(torch, kept)), "native")
    rows, chosen, ends = torch.randn(203, INPUTS), torch.tensor([0, 2]), torch.tensor([200, 203])
    made = weight.numbers.sorted_product(rows, chosen, ends, inputs_first=inputs_first)
    assert made is not None and made.shape == (203, OUTPUTS) and made.is_contiguous()
    for number, first, end in ((0, 0, 200), (2, 200, 203)):
        own = weight[number].T if inputs_first else weight[number]
        assert torch.equal(made[first:end], functional.linear(rows[first:end], own))
    assert [one.stored_as for one in weight.numbers.packed] == [kept] * EXPERTS


def test_matrices_that_are_not_alike_are_multiplied_one_by_one(kind: str) -> None:
    """Those in blocks are padded to whole ones, others not. Kernels that are not ours have no such call."""
    weight = exact(torch.randn(EXPERTS, OUTPUTS, INPUTS), kind)
    given = torch.randn(2, INPUTS), torch.tensor([1]), torch.tensor([2])
    assert (weight.numbers.sorted_product(*given, inputs_first=False) is None) == (kind == "onednn")
    # Packed in the other form.
    assert weight.numbers.sorted_product(torch.randn(2, OUTPUTS), *given[1:], inputs_first=True) is None
    if (compiled := library()) is not None:
        others = [NativeLinear(compiled, made, None) for made in (torch.randn(8, 70), torch.randn(8, 70).bfloat16())]
        assert NativeLinear.together(others[:1]) is not None and NativeLinear.together(others) is None


def held(blocks: StackedBlocks, kind: str) -> ExactWeight:
    made = exact(torch.empty(0), kind)
    return ExactWeight.whole(Numbers(owner="Test", shape=torch.Size(blocks.shape), stored=blocks, make=made.numbers.make))


def test_what_it_tells_of_itself() -> None:
    weight = exact(torch.randn(EXPERTS, OUTPUTS, INPUTS), "onednn")
    assert (weight.shape, weight.dim(), len(weight)) == ((EXPERTS, OUTPUTS, INPUTS), 3, EXPERTS)
    assert (weight.dtype, weight.device.type, weight[0].T.size(0)) == (torch.float32, "cpu", INPUTS)


def test_a_parameter_in_two_places_is_packed_once() -> None:
    class Scores(nn.Linear):
        pass

    model = nn.Sequential(Scores(8, 8, bias=False), Scores(8, 8, bias=False), nn.Embedding(8, 8), nn.LayerNorm(8))
    model[1].weight = model[0].weight
    make = maker(Choice(linears="onednn"))
    assert make is not None
    rows = torch.randn(3, 8)
    plain = model[0](rows)
    assert pack_parameters(model, make, make) == 1
    assert model[0].weight.numbers is model[1].weight.numbers
    torch.testing.assert_close(model[1](rows), plain)
    # What is looked up stays.
    assert [name for name, _ in model.named_parameters()] == ["2.weight", "3.weight", "3.bias"]


def test_a_packed_layers_own_weight(kind: str) -> None:
    plain, rows = torch.randn(OUTPUTS, INPUTS), torch.randn(5, INPUTS)
    compiled = library()
    layer: NativeLinear | OneDnnLinear
    if kind == "native":
        assert compiled is not None
        layer = NativeLinear(compiled, plain, None)
        biased: NativeLinear | OneDnnLinear = NativeLinear(compiled, plain, torch.ones(OUTPUTS))
    else:
        layer, biased = OneDnnLinear(plain, None), OneDnnLinear(plain, torch.ones(OUTPUTS))
    assert layer.weight.dtype == torch.float32
    assert torch.equal(functional.linear(rows, layer.weight), layer(rows))
    assert torch.equal(layer.weight + 0, plain)
    with pytest.raises(AttributeError, match="weight"):
        _ = biased.weight
