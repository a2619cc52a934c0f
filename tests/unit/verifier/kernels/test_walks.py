"""The order in which a device steps over rows: every row from its parent's state, and few states put aside."""

from __future__ import annotations

import math
import random

import pytest
import torch

from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.walks import (
    END_INTS,
    FROM_STATE,
    HERE,
    LINK_INTS,
    NOWHERE,
    REQUEST_INTS,
    STATE,
    STEP_INTS,
    Walked,
    WalkStep,
    steps_of,
)

# The rows that a state has seen.
Path = tuple[int, ...]


def followed(steps: list[WalkStep], slot: dict[str, Path], kept: dict[int, Path]) -> dict[int, Path]:
    """The path of every row, as a device would step; ``slot`` and ``kept`` get the states that are put there."""
    places: dict[int, Path] = {}
    found: dict[int, Path] = {}
    here: Path = ("nothing",)  # type: ignore[assignment]
    for step in steps:
        before = here if step.source == HERE else slot["own"] if step.source == STATE else places[step.source]
        here = found[step.row] = (*before, step.row)
        if step.target == STATE:
            slot["own"] = here
        elif step.target != NOWHERE:
            places[step.target] = here
        if step.saved != NOWHERE:
            kept[step.saved] = here
    return found


def tree_of(source: random.Random, chain: int, nodes: int, back: int) -> dict[int, int]:
    """Of each row its parent: a chain, then nodes whose parents are at most ``back`` rows before them."""
    parents = {row: row - 1 if row else FROM_STATE for row in range(chain)}
    for row in range(chain, chain + nodes):
        parents[row] = source.randint(max(chain - 1, row - back), row - 1)
    return parents


@pytest.mark.parametrize("back", [1, 2, 5, 200])
def test_every_row_steps_from_its_parents_state(back: int) -> None:
    source = random.Random(back)
    for _ in range(60):
        chain, nodes = source.randint(1, 5), source.randint(0, 128)
        parents = tree_of(source, chain, nodes, back)
        saved = {source.randrange(chain): 9}
        request = Walked(slot=3, parents=parents, end=chain - 1, saved=saved)
        steps, used = steps_of(request, 7)
        paths: dict[int, Path] = {}
        for row, parent in parents.items():
            paths[row] = (*(paths[parent] if parent != FROM_STATE else (-5,)), row)
        slot: dict[str, Path] = {"own": (-5,)}
        kept: dict[int, Path] = {}
        assert followed(steps, slot, kept) == paths
        assert slot["own"] == paths[chain - 1], "a tree's nodes change no state"
        assert kept == {9: paths[next(iter(saved))]}
        taken = {step.target for step in steps if step.target >= 0}
        assert taken == set(range(7, 7 + used)) and used <= math.log2(nodes + 1)


def test_a_chain_puts_nothing_aside() -> None:
    steps, used = steps_of(Walked(slot=0, parents=tree_of(random.Random(0), 40, 60, 1), end=39, saved={}), 0)
    assert used == 0 and [step.row for step in steps] == list(range(100))
    assert [step.source for step in steps] == [STATE, *[HERE] * 99]


def test_how_it_lies_in_memory() -> None:
    """Two requests, of which the first has accepted rows, and keeps a state behind one of them."""
    lines = [
        Line(slot=4, accepted=2, chain=1, parents=(-1, 0, -1), saved=[(1, 8)]),
        Line(slot=2, accepted=0, chain=3, parents=()),
    ]
    order = Order(lines=lines, padding=2, device=torch.device("cpu"))
    walk, numbers = order.walk, order.walk.numbers.tolist()
    assert (walk.requests, walk.accepted, walk.rows, walk.places) == (2, 2, 11, 0)
    assert numbers[: walk.steps_at] == [0, 6, 4, 0, 2, 6, 3, 2, 2, 1]
    assert walk.steps_at == 2 * REQUEST_INTS
    steps = numbers[walk.steps_at : walk.links_at]
    # Rows 0 and 1 are accepted, 2 is the chain, 3 to 5 are nodes: the leaf first, then the longer branch.
    assert [WalkStep(*steps[at : at + STEP_INTS]) for at in range(0, len(steps), STEP_INTS)] == [
        WalkStep(0, STATE, NOWHERE, 8),
        WalkStep(1, HERE, NOWHERE, NOWHERE),
        WalkStep(2, HERE, STATE, NOWHERE),
        WalkStep(5, HERE, NOWHERE, NOWHERE),
        WalkStep(3, STATE, NOWHERE, NOWHERE),
        WalkStep(4, HERE, NOWHERE, NOWHERE),
        WalkStep(6, STATE, NOWHERE, NOWHERE),
        WalkStep(7, HERE, NOWHERE, NOWHERE),
        WalkStep(8, HERE, STATE, NOWHERE),
    ]
    links = numbers[walk.links_at : walk.ends_at]
    assert links[: 6 * LINK_INTS] == [FROM_STATE, 4, 0, 4, 1, 4, 2, 4, 3, 4, 2, 4]
    assert len(links) == walk.rows * LINK_INTS
    assert numbers[walk.ends_at :] == [0, 8, 2, 4, 8, 2] and END_INTS == 2
