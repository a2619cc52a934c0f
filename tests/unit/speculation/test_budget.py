"""The budget: what is measured, what sources claim, and which nodes are worth their rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from speculation.acceptance_rates import AcceptanceRates
from speculation.budget import FixedBudget, MeasuredBudget, Wanted
from speculation.costs import CostTable, Load
from speculation.tree import chain, depths
from speculation.types import Proposal, TokenTree

# Up to eight rows cost what one does; then each costs as much as a quarter of a pass.
CHEAP_ROWS = {1: 1.0, 8: 1.0, 9: 1.25, 16: 3.0}
# Every row costs a pass.
DEAR_ROWS = {1: 1.0, 16: 16.0}


def load(rows: int = 1, keys: int = 0) -> Load:
    return Load(rows=rows, requests=rows, keys=keys)


def costs(by_rows: dict[int, float], per_request: float = 0.0, per_key: float = 0.0) -> CostTable:
    return CostTable(by_rows=by_rows, per_request=per_request, per_key=per_key)


def tree(*scores: float, source: str = "s") -> TokenTree:
    """A chain whose nodes claim these probabilities."""
    return chain(range(len(scores)), source, scores)


def test_costs_are_linear_between_and_beyond_what_was_measured() -> None:
    table = costs({2: 1.0, 4: 2.0}, per_request=0.5, per_key=0.01)
    assert [table.seconds(Load(rows=rows, requests=1, keys=0)) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert table.seconds(Load(rows=2, requests=3, keys=100)) == pytest.approx(1.0 + 1.0 + 1.0)


def test_loads_are_added_up() -> None:
    two = Load(rows=2, requests=2, keys=100, row_keys=100)
    assert two.plus(3) == Load(rows=5, requests=2, keys=100, row_keys=250)
    assert Load(rows=0, requests=0, keys=0).plus(3) == Load(rows=3, requests=0, keys=0)
    assert two.plus_request(7, 10) == Load(rows=9, requests=3, keys=110, row_keys=170)
    assert two.together(Load(rows=1, requests=4, keys=5, row_keys=6)) == Load(rows=3, requests=6, keys=105, row_keys=106)


def test_noise_that_makes_more_rows_cheaper_is_not_believed() -> None:
    assert costs({1: 2.0, 2: 1.0}).seconds(load(2)) == 2.0
    assert costs({1: 1.0}, per_request=-1.0, per_key=-1.0).seconds(Load(rows=1, requests=9, keys=9)) == 1.0


def test_a_machine_that_slows_down_changes_no_decision() -> None:
    table = costs(CHEAP_ROWS)
    before = table.seconds(load(16)) / table.seconds(load(1))
    for _ in range(50):
        table.learn(load(1), 3.0)
    assert table.seconds(load(1)) == pytest.approx(3.0, rel=0.05)
    assert table.seconds(load(16)) / table.seconds(load(1)) == pytest.approx(before, rel=0.05)


def test_a_pass_that_was_interrupted_says_little() -> None:
    for seconds, factor in ((1000.0, 4**0.2), (0.001, 4**-0.2)):
        table = costs(CHEAP_ROWS)
        table.learn(load(1), seconds)
        assert table.seconds(load(1)) == pytest.approx(factor, rel=0.0021)
        assert table.seconds(load(9)) == pytest.approx(1.25 * factor, rel=1e-9)


def test_a_shape_that_was_measured_wrongly_is_corrected() -> None:
    table = costs(CHEAP_ROWS)
    for _ in range(2000):
        table.learn(load(1), 1.0)
        table.learn(load(8), 2.0)
    assert table.seconds(load(8)) / table.seconds(load(1)) == pytest.approx(2.0, rel=0.1)


def test_a_cost_table_survives_a_file() -> None:
    table = CostTable(by_rows=CHEAP_ROWS, per_request=0.5, per_key=0.01, per_row_key=0.001)
    again = CostTable.from_object(table.as_object())
    assert again.as_object() == table.as_object()
    wide = Load(rows=9, requests=3, keys=100, row_keys=300)
    assert again.seconds(wide) == table.seconds(wide) == pytest.approx(1.25 + 1.0 + 1.0 + 0.3)
    for wrong in (
        {},
        [],
        {"by_rows": {}, "per_request": 0, "per_key": 0, "per_row_key": 0},
        {"by_rows": {"1": -1}, "per_request": 0, "per_key": 0, "per_row_key": 0},
        {"by_rows": {"0": 1}, "per_request": 0, "per_key": 0, "per_row_key": 0},
        {"by_rows": {"1": 3600}, "per_request": 0, "per_key": 0, "per_row_key": 0},
    ):
        with pytest.raises(ValueError, match="not a cost table"):
            CostTable.from_object(wrong)


def test_scores_become_frequencies() -> None:
    calibrator = AcceptanceRates()
    source = random.Random(1)
    assert calibrator.probabilities(tree(0.8, 0.4)) == pytest.approx([0.8, 0.4])
    for _ in range(2000):
        calibrator.learn(tree(0.8), [0] if source.random() < 0.3 else [])
    assert calibrator.probabilities(tree(0.8))[0] == pytest.approx(0.3, abs=0.05)
    # Another source, and another score of the same one, are other tables.
    assert calibrator.probabilities(tree(0.8, source="t")) == [0.8]
    assert calibrator.probabilities(tree(0.1)) == pytest.approx([0.1])


def test_a_child_is_never_likelier_than_its_parent() -> None:
    calibrator = AcceptanceRates()
    for _ in range(200):
        calibrator.learn(tree(0.2), [0])
        calibrator.learn(tree(0.9), [])
    first, second = calibrator.probabilities(tree(0.9, 0.2))
    assert first < 0.2
    assert second <= first


def test_without_scores_every_further_token_claims_half() -> None:
    assert AcceptanceRates().probabilities(chain([1, 2, 3], "s")) == [0.5, 0.25, 0.125]
    assert AcceptanceRates().probabilities(tree(0.5, 0.0)) == [0.5, 0.0]


def test_cheap_rows_are_filled_and_dear_ones_are_not() -> None:
    scores = [0.9 * 0.8**i for i in range(16)]
    (cheap,) = MeasuredBudget(costs(CHEAP_ROWS), max_nodes=64).choose([tree(*scores)], load(), load())
    (dear,) = MeasuredBudget(costs(DEAR_ROWS), max_nodes=64).choose([tree(*scores)], load(), load())
    # Seven nodes are free beside the request's own row; an eighth would have to bring a quarter of a pass.
    assert len(cheap) == 7
    assert len(dear) == 0


def test_requests_compete_by_probability() -> None:
    sure, unsure = tree(0.9, 0.8, 0.7, 0.6, 0.5), tree(0.3, 0.2, 0.1, 0.05)
    chosen = MeasuredBudget(costs({1: 1.0, 6: 1.0, 7: 9.0}), max_nodes=64).choose([unsure, sure], load(2), load(2))
    assert [len(part) for part in chosen] == [0, 4]
    assert chosen[1].tokens == sure.tokens[:4]


def test_what_is_chosen_is_the_best_number_of_nodes_and_always_a_tree() -> None:
    source = random.Random(2)
    for _ in range(200):
        parents = [source.randint(-1, node - 1) for node in range(source.randint(1, 12))]
        scores: list[float] = []
        for parent in parents:
            scores.append(source.random() * (1.0 if parent == -1 else scores[parent]))
        drafted = TokenTree(
            tokens=tuple(range(len(parents))), parents=tuple(parents), sources=("s",) * len(parents), scores=tuple(scores)
        )
        table = costs({1: 1.0, 4: 1.0 + source.random(), 16: 3.0 + source.random()})
        (chosen,) = MeasuredBudget(table, max_nodes=64).choose([drafted], load(), load())
        depths(chosen)
        best = max(range(len(scores) + 1), key=lambda k: (1 + sum(sorted(scores)[::-1][:k])) / table.seconds(load().plus(k)))
        assert len(chosen) == best


def test_sampled_trees_are_taken_whole() -> None:
    sampled = TokenTree(
        tokens=(1,), parents=(-1,), sources=("s",), proposals=(Proposal(token_ids=(1, 2), probabilities=(0.5, 0.5)),)
    )
    assert MeasuredBudget(costs(DEAR_ROWS), max_nodes=64).choose([sampled], load(), load()) == [sampled]


def test_what_does_not_pay_is_tried_again_once_in_a_while() -> None:
    budget = MeasuredBudget(costs(DEAR_ROWS), max_nodes=64)
    lengths = [len(budget.choose([tree(0.5, 0.4, 0.3)], load(), load())[0]) for _ in range(96)]
    assert sum(length > 0 for length in lengths) == 3
    assert max(lengths) == 2
    # Steps count from the last one that had nodes.
    budget = MeasuredBudget(costs({1: 1.0, 2: 1.5, 100: 50.5}), max_nodes=64)
    lengths = [len(budget.choose([tree(score)], load(), load())[0]) for score in (0.9, *[0.1] * 40)]
    assert [at for at, length in enumerate(lengths) if length] == [0, 32]


def test_drafts_are_wanted_as_large_as_could_pay() -> None:
    assert MeasuredBudget(costs(CHEAP_ROWS), max_nodes=64).wanted(load()) == Wanted(nodes=64)
    # A row takes a quarter of what a token does, and whoever thinks too little of a node may be wrong by a quarter.
    quarter = MeasuredBudget(costs({1: 1.0, 65: 17.0}), max_nodes=64)
    assert quarter.wanted(load()) == Wanted(nodes=64, min_probability=0.1875)
    assert MeasuredBudget(costs({1: 1.0, 8: 1.0, 9: 5.0}), max_nodes=64).wanted(load(8)).nodes == 0
    assert MeasuredBudget(costs(CHEAP_ROWS), max_nodes=0).wanted(load()).nodes == 0
    assert FixedBudget(max_nodes=4).wanted(load(8)) == Wanted(nodes=4)


def test_no_node_is_chosen_that_was_not_wanted() -> None:
    numbers = random.Random(4)
    for _ in range(200):
        rows = sorted({1, *(numbers.randrange(2, 60) for _ in range(5))})
        by_rows = dict(zip(rows, sorted(numbers.uniform(1, 4) for _ in rows), strict=True))
        budget = MeasuredBudget(costs(by_rows), max_nodes=8)
        scores = sorted((numbers.random() for _ in range(8)), reverse=True)
        requests = numbers.randint(1, 3)
        wanted = budget.wanted(load(requests))
        first, *_ = budget.choose([tree(*scores)] + [tree()] * (requests - 1), load(requests), load(requests))
        # The cheapest row counts for all of them.
        assert wanted.nodes or not first.tokens
        assert not first.tokens or first.scores[0] >= wanted.min_probability


def test_what_is_tried_again_is_wanted_first() -> None:
    budget = MeasuredBudget(costs(DEAR_ROWS), max_nodes=64)
    found = []
    for _ in range(64):
        nodes = budget.wanted(load()).nodes
        (chosen,) = budget.choose([tree(*(0.5, 0.4, 0.3)[:nodes])], load(), load())
        assert len(chosen) == nodes
        found.append(nodes)
    assert sorted(found) == [0] * 62 + [2, 2]


def test_a_long_prompt_stretches_a_step_only_so_far() -> None:
    budget = MeasuredBudget(costs({1: 1.0, 101: 2.0}), max_nodes=64, max_step_s=1.875)
    assert budget.prompt_rows(Load(rows=0, requests=0, keys=0), 256, 0) == 256
    # One decoding request has a row already; fifty more take the pass to a second and a half.
    assert budget.prompt_rows(load(), 256, 0) == 50
    assert budget.prompt_rows(load(), 40, 0) == 40
    crowded = MeasuredBudget(costs({1: 1.0, 2: 2.0}), max_nodes=64, max_step_s=1.875)
    assert crowded.prompt_rows(load(), 256, 0) == 16


def test_prompts_that_take_longer_than_expected_get_fewer_rows() -> None:
    budget = MeasuredBudget(costs({1: 1.0, 101: 2.0}), max_nodes=64, max_step_s=2.5)
    assert budget.prompt_rows(load(), 256, 0) == 100
    budget.learn_prompts(load(51), 2.0 * 1.5)
    # What it says of prompts counts as much as all before, and nothing of other passes.
    assert (budget.prompt_seconds(load(51)), budget.seconds(load(51))) == (1.5 * 1.5, 1.5)
    assert budget.prompt_rows(load(), 256, 0) == 33


def test_far_into_a_long_prompt_chunks_get_shorter() -> None:
    table = CostTable(by_rows={1: 0.1, 101: 0.2}, per_request=0.0, per_key=0.0, per_row_key=1e-6)
    budget = MeasuredBudget(table, max_nodes=8, max_step_s=0.3)
    beginning, end = (budget.prompt_rows(load(), 256, keys) for keys in (0, 5000))
    assert 16 < end < beginning
    for rows, keys in ((beginning, 0), (end, 5000)):
        assert table.seconds(load().plus_request(rows, keys + rows // 2)) <= 0.24
        assert table.seconds(load().plus_request(rows + 2, keys + rows // 2 + 1)) > 0.24


def test_a_step_that_is_long_for_a_prompt_makes_no_node_cheaper() -> None:
    """Beside a prompt, the step's own tokens per second are few: the likeliest node would seem worth any row."""
    table = costs({1: 1.0, 2: 1.5, 100: 50.5})
    beside = load().plus_request(90, 0)
    for score in (0.4, 0.6):
        alone, with_prompt = (
            MeasuredBudget(table, max_nodes=8).choose([tree(score)], given, load())[0] for given in (load(), beside)
        )
        assert len(alone) == len(with_prompt) == (score > 0.5)


def test_a_probe_is_never_chosen_without_its_parent() -> None:
    """It would be computed behind another text. What it is held to be worth is as much as its parent's chance, at most."""
    drafted = TokenTree(
        tokens=(1, 2, 3, 4), parents=(-1, 0, 1, -1), sources=("s",) * 4, scores=(0.1, 0.9, 0.9, 0.2), probes=(1, 2)
    )
    assert AcceptanceRates().probabilities(drafted) == pytest.approx([0.1, 0.1, 0.1, 0.2])
    source = random.Random(5)
    for _ in range(300):
        nodes = source.randint(1, 12)
        parents = [source.randint(-1, node - 1) for node in range(nodes)]
        probes: list[int] = []
        for node, parent in enumerate(parents):
            if parent in probes or source.random() < 0.4:
                probes.append(node)
        drafted = TokenTree(
            tokens=tuple(range(nodes)),
            parents=tuple(parents),
            sources=("s",) * nodes,
            scores=tuple(source.random() for _ in range(nodes)),
            probes=tuple(probes),
        )
        table = costs({1: 1.0, 4: 1.0 + source.random(), 16: 3.0 + source.random()})
        (chosen,) = MeasuredBudget(table, max_nodes=64).choose([drafted], load(), load())
        where = {token: node for node, token in enumerate(chosen.tokens)}
        for token, node in where.items():
            before = parents[token]
            assert chosen.parents[node] == (-1 if before == -1 else where[before])


def test_nodes_get_the_time_that_prompts_leave_and_no_more() -> None:
    table = costs({1: 1.0, 101: 2.0})
    beside = load().plus_request(40, 0)
    # Four fifths of it are a second and a half: fifty-one rows, of which ten are left.
    tight, wide = (MeasuredBudget(table, max_nodes=64, max_step_s=most_s) for most_s in (1.875, 10.0))
    drafted = tree(*[0.99] * 20)
    assert [len(budget.choose([drafted], beside, load())[0]) for budget in (tight, wide)] == [10, 20]
    # Without a prompt, they may take longer.
    assert len(tight.choose([tree(*[0.99] * 60)], load(), load())[0]) == 60
    # A sampled tree stays whole, or goes.
    sampled = replace(drafted, proposals=(Proposal(token_ids=(1,), probabilities=(1.0,)),) * 20)
    assert [len(budget.choose([sampled], beside, load())[0]) for budget in (tight, wide)] == [0, 20]
