"""Triton's kernels for layers with a state, through its interpreter: the CPU's numbers, and the bits of plain decoding.

What would go wrong without a sound is planted, and must be seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from typing_extensions import override

pytest.importorskip("triton")
from benchmarks.gpu_check.packings import tree
from benchmarks.gpu_check.state_gate import RandomRows, StateKind, kinds_of, recurrences
from services.verifier.kernels.triton.row_steps import MOST_KEYS, TritonSteps, columns_of
from services.verifier.kernels.whole_vectors import fill_vectors
from services.verifier.recurrence import walks
from services.verifier.recurrence.keyed_rows import KeyedRows
from services.verifier.recurrence.keyed_states import read
from services.verifier.recurrence.on_gpu import steps_on, trial
from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.walks import HERE, NOWHERE, STATE, StateWalk, Walked, WalkStep

pytestmark = pytest.mark.exhaustive

CPU = torch.device("cpu")
# Widths that fill no block, several keys of a lane, and several blocks.
SMALL = partial(kinds_of, width=24, size=12)
# As verifiers do on a CPU.
fill_vectors()
KINDS = list(SMALL("cpu"))


def one(name: str) -> Callable[[str], dict[str, StateKind]]:
    return lambda device: {name: SMALL(device)[name]}


def checked(name: str, steps: TritonSteps | None = None) -> dict[str, Any]:
    """What the gate for GPUs finds in one kind of layer."""
    verdict = recurrences("cpu", steps or TritonSteps(), length=8, depth=2, others=2, kinds=one(name))
    return {**verdict.figures, "result": verdict.result, "found": verdict.found}


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_chunks_and_trees_have_the_bits_of_plain_decoding(name: str) -> None:
    found = checked(name)
    assert found["result"] == "pass" and found["compared"] > 8, found["found"]


@pytest.mark.parametrize("name", KINDS)
def test_states_are_kept_in_mid_line(name: str) -> None:
    """Behind accepted rows, behind rows of the chain, and at its end: the state that a pass up to there leaves."""
    text = RandomRows(SMALL("cpu")[name], 12, CPU, TritonSteps())
    text.chain(0, 3)
    begun = text.states.clone()
    right = {}
    for end in (4, 8, 9):
        text.states = begun.clone()
        text.chain(3, end)
        right[end] = text.states[1].clone()
    text.states = begun.clone()
    # Slots 0 and 2 hold copies; two accepted rows, four of the chain, and two nodes.
    line = Line(slot=1, accepted=2, chain=4, parents=(-1, -1), saved=[(1, 0), (5, 2)])
    text.run([line], range(3, 11))
    assert torch.equal(text.states, torch.stack([right[4], right[9], right[8]]))


@pytest.mark.parametrize("name", KINDS)
def test_who_else_is_in_the_pass_changes_nothing(name: str) -> None:
    """The state itself, with a request before it, one behind it, and padding."""
    text = RandomRows(SMALL("cpu")[name], 10, CPU, TritonSteps())
    made = text.chain(0, 6)
    right = text.states[1].clone()
    text.states.zero_()
    lines = [Line(slot=slot, accepted=0, chain=chain, parents=()) for slot, chain in ((2, 3), (1, 6), (0, 2))]
    beside = text.run(lines, [5, 6, 7, *range(6), 1, 2], padding=3)
    assert torch.equal(beside[3:9], made) and torch.equal(text.states[1], right)


def _sibling(request: Walked, first_place: int) -> tuple[list[WalkStep], int]:
    """A fault: a row steps from the row before it, whosever child it is."""
    steps, used = _steps_of(request, first_place)
    return [steps[0], *(step._replace(source=HERE) for step in steps[1:])], used


def _put_nowhere(request: Walked, first_place: int) -> tuple[list[WalkStep], int]:
    """A fault: the chain's last state is not the request's afterwards."""
    steps, used = _steps_of(request, first_place)
    return [step._replace(target=NOWHERE if step.target == STATE else step.target) for step in steps], used


def _nodes_are_kept(request: Walked, first_place: int) -> tuple[list[WalkStep], int]:
    """A fault: one step too many, a node's, is in the request's state."""
    steps, used = _steps_of(request, first_place)
    return [*steps[:-1], steps[-1]._replace(target=STATE)], used


_steps_of = walks.steps_of


@pytest.mark.parametrize("fault", [_sibling, _put_nowhere, _nodes_are_kept], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["gated delta rule", "gated linear unit", "weighted mean"])
def test_a_walk_that_is_wrong_is_seen(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "steps_of", fault)
    assert checked(name)["differ"]


class _ShiftedWindow(TritonSteps):
    """A fault: a row's window ends one row too early."""

    @override
    def convolved(self, walk: StateWalk, states: torch.Tensor, given: torch.Tensor, *weights: Any) -> torch.Tensor:
        numbers = walk.numbers.clone()
        links = numbers[walk.links_at : walk.ends_at].view(-1, walks.LINK_INTS)
        parents = links[:, 0].clone().long()
        links[:, 0] = torch.where(parents >= 0, links[parents.clamp(min=0), 0], parents)
        return super().convolved(replace(walk, numbers=numbers), states, given, *weights)


class _EndsBefore(TritonSteps):
    """A fault: the inputs that are held are those of the row before the last."""

    @override
    def convolved(self, walk: StateWalk, states: torch.Tensor, given: torch.Tensor, *weights: Any) -> torch.Tensor:
        numbers = walk.numbers.clone()
        ends = numbers[walk.ends_at :].view(-1, walks.END_INTS)
        ends[:, 0] = (ends[:, 0] - 1).clamp(min=0)
        return super().convolved(replace(walk, numbers=numbers), states, given, *weights)


@pytest.mark.parametrize("steps", [_ShiftedWindow(), _EndsBefore()], ids=lambda steps: type(steps).__name__)
def test_a_window_that_is_off_by_one_is_seen(steps: TritonSteps) -> None:
    assert checked("convolution of three", steps)["differ"]


class _SiblingsState(Order):
    """A fault: a node steps from the row before it."""

    @property
    @override
    def parents(self) -> list[tuple[int, int, int]]:
        right = Order.parents.func(self)  # type: ignore[attr-defined]
        return [
            (row, parent if parent == walks.FROM_STATE or before[2] != request else before[0], request)
            for before, (row, parent, request) in zip([(0, 0, -1), *right], right, strict=False)
        ]


@pytest.mark.parametrize("name", KINDS)
def test_an_order_that_is_wrong_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.state_gate.Order", _SiblingsState)
    assert checked(name)["differ"]


class _OtherSums(TritonSteps):
    """A fault: sums over keys of passes of many rows run in another order."""

    @override
    def keyed(self, walk: StateWalk, states: torch.Tensor, rows: KeyedRows) -> torch.Tensor:
        if walk.rows <= 3:
            return super().keyed(walk, states, rows)
        turned = {name: getattr(rows, name).flip(2) for name in ("keys", "queries")}
        made_states = states.flip(2).contiguous()
        made = super().keyed(walk, made_states, replace(rows, **turned))
        states.copy_(made_states.flip(2))
        return made


def test_sums_in_another_order_are_seen() -> None:
    assert checked("Mamba-2", _OtherSums())["differ"]


def test_keys_that_fill_several_lanes_and_many_values() -> None:
    """As of Mamba and of the largest states: several programs of a head, and keys beyond a power of two."""
    for keys, values in ((20, 70), (MOST_KEYS, 9)):
        torch.manual_seed(0)
        rows = KeyedRows(
            keys=torch.randn(5, 1, keys) / keys**0.5, queries=torch.randn(5, 1, keys), values=torch.randn(5, 2, values),
            factors=torch.rand(5, 2, 1), parts=torch.rand(5, 2),
        )  # fmt: skip
        lines = [Line(slot=0, accepted=1, chain=2, parents=(-1, -1))]
        states = torch.randn(1, 2, keys, values)
        right_states = states.clone()
        order = Order(lines=lines, padding=0, device=CPU)
        made = TritonSteps().keyed(order.walk, states, rows)
        torch.testing.assert_close(made, read(order, right_states, rows), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states, right_states, atol=1e-4, rtol=1e-4)
    assert [columns_of(keys) for keys in (12, 16, 64, 128, 256)] == [32, 32, 16, 8, 8]


def test_where_states_are_not_stepped() -> None:
    """Not without Triton, on old GPUs, nor with more keys than registers hold; a CPU needs nothing."""
    cuda = torch.device("cuda")
    assert steps_on(CPU) == (None, "")
    assert steps_on(cuda, find=lambda _: None) == (None, "triton is not installed")
    found, reason = steps_on(cuda, capability_of=lambda _: (7, 0))
    assert found is None and "compute capability is 7.0" in reason
    assert trial(TritonSteps(), CPU) == ""

    class Broken(TritonSteps):
        @override
        def convolved(self, *_: Any) -> torch.Tensor:
            raise RuntimeError("no C compiler")

    assert trial(Broken(), CPU) == "RuntimeError: no C compiler"
    assert TritonSteps().refusal((4, MOST_KEYS, 64)) == TritonSteps().refusal((3, 4096)) == ""
    assert "its states have 512 keys: must be at most 256" in TritonSteps().refusal((4, 512, 64))


def test_trees_of_many_nodes_beside_each_other() -> None:
    """Places of several requests do not collide: each node has the bits that it has in a chain."""
    kind = SMALL("cpu")["Mamba-2"]
    text, source = RandomRows(kind, 16, CPU, TritonSteps()), random.Random(5)
    packed = [tree(start, 4, 4, 16, source.randrange(99)) for start in (0, 0, 0)]
    lines = [Line(slot=slot, accepted=0, chain=1, parents=each.parents) for slot, each in enumerate(packed)]
    made = text.run(lines, [row for each in packed for row in each.shown])
    text.states.zero_()
    plain = text.chain(0, 5)
    at = 0
    for each in packed:
        assert torch.equal(made[at : at + len(each.shown)][list(each.path)], plain)
        at += len(each.shown)
