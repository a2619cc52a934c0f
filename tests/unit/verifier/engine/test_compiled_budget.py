"""The compiled budget decides what the Python form does, on random steps that both learn from."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.verifier.engine.native import node_choice
from services.verifier.engine.native.library import engine_library
from services.verifier.engine.native.node_choice import CompiledBudget, measured_budget
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.types import Proposal, TokenTree
from tests.engine.fakes import random_tree

LIBRARY = engine_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no compiler")


def table(source: random.Random) -> CostTable:
    rows = sorted(source.sample(range(1, 300), source.randint(1, 8)))
    by_rows = {each: source.uniform(0.001, 0.02) * (1 + each / 50) for each in rows}
    return CostTable(by_rows=by_rows, per_request=source.random() * 1e-4, per_key=1e-7, per_row_key=source.random() * 1e-9)


def tree_of(source: random.Random) -> TokenTree:
    made = random_tree(source, source.choice((0, 3, 12)), 50)
    made = replace(made, sources=tuple(source.choice(("suffix", "recycling", "other")) for _ in made.sources))
    kind = source.randrange(8)
    if kind == 0:
        return replace(made, scores=())
    if kind == 1 and len(made) and len(made) - 1 not in made.parents:
        return replace(made, probes=(len(made) - 1,), scores=made.scores if source.random() < 0.5 else ())
    if kind == 3:
        # What other versions may send.
        return replace(made, scores=tuple(2 * each - 0.5 for each in made.scores))
    if kind == 2:
        return replace(made, proposals=(Proposal(token_ids=(1,), probabilities=(1.0,)),) * len(made))
    return made


def step_of(source: random.Random) -> tuple[list[TokenTree], Load, Load]:
    trees = [tree_of(source) for _ in range(source.randint(1, 20))]
    keys = [source.randrange(2000) for _ in trees]
    decoding = Load(rows=len(keys), requests=len(keys), keys=sum(keys), row_keys=sum(keys))
    return trees, decoding.plus_request(100, 700) if source.random() < 0.3 else decoding, decoding


@pytest.mark.examples(4)
@pytest.mark.parametrize("seed", range(60))
def test_it_decides_the_same(seed: int) -> None:
    assert LIBRARY is not None
    source = random.Random(seed)
    most_s = source.choice((0.02, 0.2, float("inf")))
    costs = table(random.Random(seed)), table(random.Random(seed))
    python = MeasuredBudget(costs[0], max_nodes=32, max_step_s=most_s)
    compiled = CompiledBudget(LIBRARY, costs[1], max_nodes=32, max_step_s=most_s)
    checked = 0
    for _ in range(40):
        trees, load, decoding = step_of(source)
        assert [compiled.probabilities(each) for each in trees] == [python.probabilities(each) for each in trees]
        chosen = python.choose(trees, load, decoding)
        assert compiled.choose(trees, load, decoding) == chosen
        checked += sum(map(len, chosen))
        outcomes = [(each, tuple(range(source.randint(0, len(each))))) for each in chosen if len(each) and not each.probes]
        for budget in (python, compiled):
            budget.learn(load, 0.01 + 0.001 * len(outcomes), outcomes)
    assert checked or most_s == 0.02


def test_old_nodes_fade_alike() -> None:
    assert LIBRARY is not None
    source = random.Random(5)
    costs = CostTable(by_rows={1: 0.01}, per_request=0.0, per_key=0.0)
    python, compiled = MeasuredBudget(costs, max_nodes=32), CompiledBudget(LIBRARY, costs, max_nodes=32)
    drafted = [random_tree(source, 12, 50) for _ in range(8)]
    for _ in range(200):
        outcomes = [(each, tuple(range(source.randint(0, len(each))))) for each in drafted if len(each)]
        for budget in (python, compiled):
            budget.learn(Load(rows=1, requests=1, keys=0), 0.01, outcomes)
        assert [compiled.probabilities(each) for each in drafted] == [python.probabilities(each) for each in drafted]


def test_without_a_compiler_the_python_form_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = CostTable(by_rows={1: 1.0}, per_request=0.0, per_key=0.0)
    assert isinstance(measured_budget(costs, max_nodes=4), CompiledBudget)
    monkeypatch.setattr(node_choice, "engine_library", lambda: None)
    assert type(measured_budget(costs, max_nodes=4)) is MeasuredBudget
