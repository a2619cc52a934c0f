"""Drafts for likely outcomes, grown by a model whose numbers are drawn: they are bounded, and behind what the draft leaves over."""

from __future__ import annotations

import numpy as np
import pytest

from services.drafter.heads.beam import BestFirst, DynamicTree, Growth, Indices, Numbers, TreeGrowth
from services.drafter.heads.outcome_trees import OutcomeTrees
from speculation.tree import follow, validate

_VOCAB = 40


class DrawnModel:
    """Says of every row something else, and counts what it was run for."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.default_rng(seed)
        self.run: list[int] = []

    def grow(self, growth: Growth, nodes: Indices) -> None:
        while len(nodes):
            self.run += nodes.tolist()
            growth.add(*self._children(len(nodes), growth.children))
            nodes = growth.grow()

    def _children(self, rows: int, count: int) -> tuple[Indices, Numbers]:
        tokens = np.array([self._source.permutation(_VOCAB)[:count] for _ in range(rows)])
        chances = self._source.dirichlet([float(self._source.choice([0.05, 0.5]))] * count, rows)
        return tokens, np.log(np.clip(-np.sort(-chances), 1e-9, 1.0))


@pytest.mark.examples(5)
@pytest.mark.parametrize("dynamic", [False, True], ids=["best", "eagle2"])
@pytest.mark.parametrize("seed", range(60))
def test_they_run_no_more_than_they_say(seed: int, dynamic: bool) -> None:
    source = np.random.default_rng(seed)
    max_nodes, steps, width, most = (int(source.integers(1, each)) for each in (25, 6, 6, 4))
    model = DrawnModel(seed)
    draft: TreeGrowth = BestFirst(max_nodes, steps=steps, width=width)
    if dynamic:
        # It runs the best of each level, of which few may be among the best of all: these may be outcomes.
        draft = DynamicTree(total=1 + max_nodes // 4 + 1, depth=steps, top_k=width)
    model.grow(draft, np.array([-1]))
    before, tree = len(model.run), draft.tree("eagle")
    # The root's own row is the last committed token's.
    assert before - 1 <= draft.rows
    growth = OutcomeTrees(draft, most=most, max_nodes=max_nodes, steps=steps, width=width)
    model.grow(growth, growth.grow())
    assert len(model.run) == len(set(model.run))
    assert len(model.run) - before <= growth.rows
    found = growth.found("eagle")
    assert len(found) <= most
    assert len({each.assumed for each in found}) == len(found)
    for each in found:
        assert follow(tree, each.assumed) == len(each.assumed) - 1
        validate(each.tree, vocab_size=_VOCAB, max_nodes=max_nodes, sources=["eagle"])
