"""Both acceptance rules, enumerated exactly on four tokens; the wrong rules of the literature fail the same test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from speculation import acceptance, rejection
from speculation.acceptance import StopRule
from speculation.tree import path_to, prune
from speculation.types import TokenTree
from tests.lossless.enumeration import (
    LENGTH,
    VOCAB,
    Oracle,
    Output,
    complete,
    distance,
    draft,
    outcomes,
    plain,
    sampled_tree,
    target,
    tree_of,
    trials,
)

NO_STOP = StopRule(stop_token_ids=frozenset(), generated=0, room=10**6)
EXACT = 1e-12


FIXED_TREES = {
    "empty": tree_of((), ()),
    "chain": tree_of((1, 2), (-1, 0)),
    "wide": tree_of((0, 1, 2, 3), (-1, -1, -1, -1)),
    "branching": tree_of((0, 1, 2, 3, 0, 2), (-1, -1, 0, 0, 1, 2)),
    "twins": tree_of((1, 1, 2, 2), (-1, -1, 0, 1)),
}


def after(tree: TokenTree, node: int) -> np.ndarray:
    return target([tree.tokens[i] for i in path_to(tree, node)])


def by_walk(tree: TokenTree, oracle: Oracle) -> Output:
    accepted = acceptance.walk(tree, lambda node: oracle.choose(after(tree, node).tolist()), NO_STOP)
    return complete(accepted.tokens, oracle)


def by_rejection(tree: TokenTree, oracle: Oracle) -> Output:
    accepted = rejection.accept(tree, trials(tree, lambda node: after(tree, node), oracle), 0, NO_STOP)
    return complete(accepted.tokens, oracle)


@pytest.mark.parametrize("name", FIXED_TREES)
@pytest.mark.parametrize("rule", [by_walk, by_rejection])
def test_deterministic_trees(rule: Callable[[TokenTree, Oracle], Output], name: str) -> None:
    assert distance(outcomes(lambda oracle: rule(FIXED_TREES[name], oracle)), plain()) < EXACT


SHAPES = [(1, 1, True), (1, 2, True), (2, 1, True), (2, 1, False), (3, 1, False), (2, 2, False)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_trees_under_rejection(shape: tuple[int, int, bool]) -> None:
    assert distance(outcomes(lambda oracle: by_rejection(sampled_tree(oracle, draft, *shape), oracle)), plain()) < EXACT


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_sampled_trees_under_the_walk(shape: tuple[int, int, bool]) -> None:
    def run(oracle: Oracle) -> Output:
        tree = sampled_tree(oracle, draft, *shape)
        # The walk does not mind that nodes are dropped after their tokens were seen.
        return by_walk(prune(tree_of(tree.tokens, tree.parents), 1, 2), oracle)

    assert distance(outcomes(run), plain()) < EXACT


def test_expected_accepted_tokens_are_the_sum_of_path_probabilities() -> None:
    tree = FIXED_TREES["branching"]
    total = 0.0

    def run(oracle: Oracle) -> Output:
        accepted = acceptance.walk(tree, lambda node: oracle.choose(after(tree, node).tolist()), NO_STOP)
        return (len(accepted.path),)

    expected = sum(count[0] * probability for count, probability in outcomes(run).items())
    for node in range(len(tree)):
        path = path_to(tree, node)
        probability = 1.0
        for depth, step in enumerate(path):
            probability *= target([tree.tokens[i] for i in path[:depth]])[tree.tokens[step]]
        total += probability
    assert expected == pytest.approx(total, abs=EXACT)


# --- rules that are wrong, and must be seen to be -----------------------------------------------------------------


def residual_forgotten(oracle: Oracle) -> Output:
    """After a rejection draws from p, not from norm([p - q]+)."""
    q, p = draft(()), target(())
    token = oracle.choose(q.tolist())
    if oracle.coin(p[token] / q[token], 0, 0):
        return complete((token,), oracle)
    return complete((oracle.draw(p, 0),), oracle)


def wrong_q(oracle: Oracle) -> Output:
    """Samples from one q and accepts with another (a common bug of sampled drafting)."""
    q, p = draft(()), target(())
    sharper = q**2 / (q**2).sum()
    token = oracle.choose(sharper.tolist())
    if oracle.coin(p[token] / q[token], 0, 0):
        return complete((token,), oracle)
    return complete((oracle.draw(rejection.residual(p, q), 0),), oracle)


def all_of_the_rejections(oracle: Oracle) -> Output:
    """``if first_rejection_indices.all()``: asks for the indices' values, so a rejection at index 0 accepts everything."""
    drafted: list[int] = []
    for _ in range(2):
        drafted.append(oracle.choose(draft(drafted).tolist()))
    rejected = []
    for index, token in enumerate(drafted):
        p, q = target(drafted[:index]), draft(drafted[:index])
        if not oracle.coin(p[token] / q[token], index, 0):
            rejected.append(index)
    if all(rejected):
        cut = rejected[0] if rejected else 2
        if not rejected:
            return complete((*drafted, oracle.choose(target(drafted).tolist())), oracle)
        rest = rejection.residual(target(drafted[:cut]), draft(drafted[:cut]))
        return complete((*drafted[:cut], oracle.draw(rest, cut)), oracle)
    return complete(drafted, oracle)


def independent_rows(oracle: Oracle) -> Output:
    """REST's and Medusa's sampled verification: one draw per (row, depth), then the row that matches longest."""
    rows = ((0, 2), (0, 3), (1, 0))
    best: tuple[int, ...] = ()
    for row in rows:
        matched: list[int] = []
        for token in row:
            if oracle.choose(target(matched).tolist()) != token:
                break
            matched.append(token)
        if len(matched) > len(best):
            best = tuple(matched)
    return complete((*best, oracle.choose(target(best).tolist())), oracle)


def typical_acceptance(oracle: Oracle) -> Output:
    """Medusa's: accepts what is likely enough."""
    p = target(())
    entropy = float(-(p * np.log(p)).sum())
    token = int(p.argmax())
    if p[token] > min(0.3, 0.9 * np.exp(-entropy)):
        return complete((token,), oracle)
    return complete((), oracle)


WRONG = [residual_forgotten, wrong_q, all_of_the_rejections, independent_rows, typical_acceptance]


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_wrong_rules_are_caught(rule: Callable[[Oracle], Output]) -> None:
    result = outcomes(rule)
    assert sum(result.values()) == pytest.approx(1)
    assert distance(result, plain()) > 1e-3


def test_the_enumeration_itself_adds_up() -> None:
    result = plain()
    assert len(result) == VOCAB**LENGTH
    assert sum(result.values()) == pytest.approx(1)
