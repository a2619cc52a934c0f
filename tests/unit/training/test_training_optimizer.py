"""Muon beside AdamW: which parameters it trains, and along what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.optimizer import Optimizer, orthogonal
from training.recipe import LayersRecipe


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_the_nearest_semi_orthogonal_matrix(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(matrix)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    # The same directions, lengths near 1; the iteration is not meant to come nearer.
    lengths = (left.T @ found @ right.T).diagonal()
    assert torch.allclose(left @ lengths.diag() @ right, found, atol=1e-4)
    assert lengths[values > 0.1 * values.max()].sub(1).abs().max() < 0.4


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    return {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in (("w", (4, 6)), ("b", (6,)))}


def optimizer(held: dict[str, nn.Parameter], **recipe: float) -> Optimizer:
    return Optimizer(held, LayersRecipe(kind="draft_model", precision="float32", warmup=0.0, steps=10, **recipe))  # type: ignore[arg-type]


def test_it_trains_matrices_alone() -> None:
    ours, adam = parameters(), parameters()
    for held, made in ((ours, optimizer(ours, muon_rate=0.1)), (adam, optimizer(adam))):
        for each in held.values():
            each.grad = torch.ones_like(each)
        made.make_step(0, 1)
        assert all(each.grad is None for each in held.values())
    assert torch.equal(ours["b"], adam["b"]) and not torch.equal(ours["w"], adam["w"])
    moved = parameters()["w"] - ours["w"]
    expected = 0.1 * 0.2 * 6**0.5 * orthogonal(torch.ones(4, 6))
    assert torch.allclose(moved, expected, atol=1e-6)


def test_scaled_rates_are_of_a_tensors_size() -> None:
    held = {name: nn.Parameter(torch.full((2, 3), size)) for name, size in (("large", 8.0), ("one", 1.0), ("zero", 0.0))}
    made = optimizer(held, scaled_rates=True, learning_rate=0.01)
    for each in held.values():
        each.grad = torch.ones_like(each)
    made.make_step(0, 1)
    moved = [size - float(each.detach()[0, 0]) for size, each in zip((8.0, 1.0, 0.0), held.values(), strict=True)]
    assert moved == pytest.approx([0.08, 0.01, 0.001], rel=1e-3)


def test_adamw_trains_rows_of_tokens() -> None:
    ours, adam = parameters(), parameters()
    recipe = LayersRecipe(kind="draft_model", warmup=0.0, steps=10, muon_rate=0.1)
    made = (Optimizer(ours, recipe, tokens=4), Optimizer(adam, recipe.model_copy(update={"muon_rate": None})))
    for held, each in zip((ours, adam), made, strict=True):
        held["w"].grad = torch.ones(4, 6)
        each.make_step(0, 1)
    assert torch.equal(ours["w"], adam["w"])


def test_there_may_be_matrices_alone() -> None:
    held = {"w": parameters()["w"]}
    made = optimizer(held, muon_rate=0.1)
    held["w"].grad = torch.ones(4, 6)
    made.make_step(0, 1)
    assert not torch.equal(held["w"], parameters()["w"])
    made.restore(made.tensors())


def test_its_momentum_is_kept_and_restored() -> None:
    whole, first = parameters(), parameters()
    one, other = optimizer(whole, muon_rate=0.1), optimizer(first, muon_rate=0.1)

    def step(held: dict[str, nn.Parameter], made: Optimizer, number: int) -> None:
        for each in held.values():
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(number))
        made.make_step(number, 1)

    for made, held in ((one, whole), (other, first)):
        step(held, made, 0)
    resumed, forgetful = optimizer(first, muon_rate=0.1), parameters()
    resumed.restore(other.tensors())
    with torch.no_grad():
        for name, each in forgetful.items():
            each.copy_(first[name])
    step(whole, one, 1)
    step(first, resumed, 1)
    step(forgetful, optimizer(forgetful, muon_rate=0.1), 1)
    assert all(torch.equal(first[name], each) for name, each in whole.items())
    assert not torch.equal(forgetful["w"], whole["w"])
