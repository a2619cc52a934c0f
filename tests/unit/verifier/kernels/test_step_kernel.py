"""States that hold values by their keys: the compiled kernel computes what torch does, and a row's bits hang on its path alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.verifier.kernels.native.library import Library, instruction_sets, library
from services.verifier.kernels.native.step_kernel import fits
from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.keyed_states import read
from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.walks import FROM_STATE

HEADS, KEY_HEADS, KEYS = 4, 2, 12
# A whole panel and half of one.
VALUES = 48
SLOTS = 3
PARENTS = (FROM_STATE, 0, 0, FROM_STATE, 2, 1, 4)
KINDS = ["one factor", "a factor for each key", "factors of numbers", "corrected"]


@pytest.fixture
def kernels() -> Library:
    found = library()
    if found is None:
        pytest.skip("our kernels cannot be compiled here")
    return found


def given(count: int, kind: str) -> KeyedRows:
    torch.manual_seed(1)
    keys, queries = torch.randn(2, count, KEY_HEADS, KEYS)
    values = torch.randn(count, HEADS, VALUES)
    if kind == "factors of numbers":
        times, decay = torch.rand(count, HEADS, VALUES), -torch.rand(HEADS, KEYS, VALUES)
        return KeyedRows(keys=keys, queries=queries, values=values, times=times, decay=decay)
    factors = torch.rand(count, HEADS, 1 if kind == "one factor" else KEYS)
    parts = torch.rand(count, HEADS) / KEYS if kind == "corrected" else None
    return KeyedRows(keys=keys, queries=queries, values=values, factors=factors, parts=parts)


def rows_of(rows: KeyedRows, numbers: list[int]) -> KeyedRows:
    given = {name: getattr(rows, name) for name in ("keys", "queries", "values", "factors", "times", "parts")}
    parts: dict[str, Any] = {name: tensor[numbers] for name, tensor in given.items() if tensor is not None}
    return replace(rows, **parts)


def order(lines: Sequence[Line], kernels: Library | None, padding: int = 0) -> Order:
    return Order(lines=lines, padding=padding, device=torch.device("cpu"), library=kernels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_computes_what_torch_does(
    kernels: Library, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.verifier.kernels.native.step_kernel._ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lines = [Line(slot=2, accepted=3, chain=5, parents=PARENTS), Line(slot=0, accepted=0, chain=2, parents=())]
    rows = given(3 + 5 + 7 + 2 + 1, kind)
    states = torch.randn(SLOTS, HEADS, KEYS, VALUES)
    right_states = states.clone()
    assert fits(states)
    made = read(order(lines, kernels, padding=1), states, rows)
    right = read(order(lines, None, padding=1), right_states, rows)
    torch.testing.assert_close(made, right, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, right_states, atol=1e-4, rtol=1e-4)
    assert not made[-1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_has_the_same_bits_alone_and_in_a_tree(kernels: Library, kind: str, compiled: bool) -> None:
    by = kernels if compiled else None
    rows = given(4 + len(PARENTS), kind)
    states = torch.randn(SLOTS, HEADS, KEYS, VALUES)
    begun = states.clone()
    tree = read(order([Line(slot=1, accepted=0, chain=4, parents=PARENTS)], by), states, rows)
    # The path 0, 2, 4, 6 of the tree, after the chain.
    for at in (0, 1, 2, 3, 4, 6, 8, 10):
        alone = read(order([Line(slot=1, accepted=0, chain=1, parents=())], by), begun, rows_of(rows, [at]))
        assert torch.equal(alone[0], tree[at])
        if at == 3:
            assert torch.equal(begun, states), "a tree's nodes change no state"


@pytest.mark.parametrize("kind", KINDS)
def test_all_instruction_sets_compute_the_same_bits(kernels: Library, kind: str) -> None:
    rows, begun = given(4 + len(PARENTS), kind), torch.randn(SLOTS, HEADS, KEYS, VALUES)
    line = [Line(slot=1, accepted=0, chain=4, parents=PARENTS)]
    states = begun.clone()
    right = read(order(line, kernels), states, rows)
    for name in instruction_sets():
        own = begun.clone()
        assert torch.equal(read(order(line, library(name)), own, rows), right)
        assert torch.equal(own, states)


def test_other_sizes_are_left_to_torch() -> None:
    assert not fits(torch.empty(1, 1, 6, 32))
    assert not fits(torch.empty(1, 1, 8, 24))
