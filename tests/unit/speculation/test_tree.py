"""Token trees: validation names the fault; merging and pruning keep what they promise."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation import limits
from speculation.errors import MalformedTree
from speculation.tree import (
    ROOT,
    chain,
    children,
    claims,
    depths,
    descend,
    follow,
    follow_on,
    merge,
    path_to,
    prune,
    take,
    validate,
)
from speculation.types import Proposal, TokenTree
from tests.engine.fakes import random_tree

trees = st.builds(lambda seed, nodes: random_tree(random.Random(seed), nodes, 8), st.integers(0, 10**6), st.integers(0, 24))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in path_to(tree, node)) for node in range(len(tree))}


def proposed(ids: Sequence[int], probabilities: Sequence[float]) -> TokenTree:
    """A tree of one node that holds 1."""
    proposal = Proposal(token_ids=tuple(ids), probabilities=tuple(probabilities))
    return TokenTree(tokens=(1,), parents=(-1,), sources=("a",), proposals=(proposal,))


GOOD = TokenTree(tokens=(1, 2, 3), parents=(-1, 0, 0), sources=("a", "a", "a"))


@pytest.mark.parametrize(
    ("field", "tree"),
    [
        ("tree.tokens", TokenTree(tokens=(1,) * 9, parents=tuple(range(-1, 8)), sources=("a",) * 9)),
        ("tree.tokens[1]", TokenTree(tokens=(1, 99), parents=(-1, 0), sources=("a", "a"))),
        ("tree.tokens[0]", TokenTree(tokens=(-1,), parents=(-1,), sources=("a",))),
        ("tree.tokens[0]", TokenTree(tokens=(8,), parents=(-1,), sources=("a",))),
        ("tree.parents", TokenTree(tokens=(1, 2), parents=(-1,), sources=("a", "a"))),
        ("tree.parents[1]", TokenTree(tokens=(1, 2), parents=(-1, 1), sources=("a", "a"))),
        ("tree.parents[0]", TokenTree(tokens=(1, 2), parents=(1, 0), sources=("a", "a"))),
        ("tree.parents[0]", TokenTree(tokens=(1,), parents=(-2,), sources=("a",))),
        ("tree.sources", TokenTree(tokens=(1,), parents=(-1,))),
        ("tree.scores", TokenTree(tokens=(1, 2), parents=(-1, 0), sources=("a", "a"), scores=(1.0,))),
        ("tree.scores[0]", TokenTree(tokens=(1,), parents=(-1,), sources=("a",), scores=(float("nan"),))),
        ("tree.probes", TokenTree(tokens=(1,), parents=(-1,), sources=("a",), probes=(1,))),
        ("tree.probes", TokenTree(tokens=(1,), parents=(-1,), sources=("a",), probes=(0, 0))),
        ("tree.parents[1]", TokenTree(tokens=(1, 2), parents=(-1, 0), sources=("a", "a"), probes=(0,))),
        ("tree.proposals[0]", proposed((2,), (1.0,))),
        ("tree.proposals[0]", proposed((1, 2), (0.0, 1.0))),
        ("tree.proposals[0]", proposed((1, 2), (1.5, -0.5))),
        ("tree.proposals[0]", proposed((1, 2), (0.5, 0.49))),
        ("tree.proposals[0]", proposed((1, 2), (1.0,))),
        ("tree.proposals[0]", proposed((1, 1), (0.5, 0.5))),
        ("tree.proposals[0]", proposed((1, 8), (0.5, 0.5))),
        ("tree.proposals[0]", proposed((1, -1), (0.5, 0.5))),
    ],
)
def test_malformed_trees_are_named(field: str, tree: TokenTree) -> None:
    with pytest.raises(MalformedTree) as caught:
        validate(tree, vocab_size=8, max_nodes=8)
    assert caught.value.field == field


def test_a_good_tree_is_fine() -> None:
    validate(GOOD, vocab_size=8, max_nodes=3)
    validate(GOOD, vocab_size=8, max_nodes=3, sources={"a", "b"})
    validate(proposed((1, 2, 0), (0.5, 0.4995, 0.0)), vocab_size=8, max_nodes=3)
    most = limits.MAX_PROPOSAL
    validate(proposed(range(most), [1 / most] * most), vocab_size=most, max_nodes=3)
    with pytest.raises(MalformedTree):
        validate(proposed(range(most + 1), [1 / (most + 1)] * (most + 1)), vocab_size=most + 1, max_nodes=3)


def test_nobody_drafts_who_was_not_asked() -> None:
    tree = TokenTree(tokens=(1, 2), parents=(-1, 0), sources=("a", "made up"))
    with pytest.raises(MalformedTree) as caught:
        validate(tree, vocab_size=8, max_nodes=8, sources={"a", "b"})
    assert caught.value.field == "tree.sources[1]"


def test_nothing_is_taken_without_its_parent() -> None:
    assert take(GOOD, [0, 2]).parents == (-1, 0)
    with pytest.raises(ValueError, match="without its parent"):
        take(GOOD, [1])


@given(trees, st.lists(st.integers(0, 7), max_size=6))
def test_following_goes_as_far_as_a_path_does(tree: TokenTree, tokens: list[int]) -> None:
    # Of equal siblings the first one is followed, and what is below the others is not; merging makes them one.
    tree = merge([tree])
    every = paths(tree) | {()}
    assert follow(tree, tokens) == max(end for end in range(len(tokens) + 1) if tuple(tokens[:end]) in every)


@given(trees)
def test_depths_paths_and_children_agree(tree: TokenTree) -> None:
    depth, below = depths(tree), children(tree)
    for node in range(len(tree)):
        path = path_to(tree, node)
        assert len(path) == depth[node]
        assert node in below[tree.parents[node]]


@given(st.lists(trees, max_size=4))
def test_merge_is_the_union_of_paths(parts: list[TokenTree]) -> None:
    merged = merge(parts)
    validate(merged, vocab_size=8, max_nodes=512)
    assert paths(merged) == set().union(*(paths(part) for part in parts)) if parts else len(merged) == 0
    siblings = [(parent, token) for parent, token in zip(merged.parents, merged.tokens, strict=True)]
    assert len(siblings) == len(set(siblings))


def test_merge_keeps_the_better_score_and_its_source() -> None:
    merged = merge([chain([1, 2], "low", [0.2, 0.1]), chain([1, 3], "high", [0.9, 0.8])])
    assert merged.tokens == (1, 2, 3)
    assert merged.parents == (-1, 0, 0)
    assert merged.sources == ("high", "low", "high")
    assert merged.scores == (0.9, 0.1, 0.8)


def test_merge_believes_whom_it_is_told_to() -> None:
    loud, honest = chain([1], "loud", [0.9]), chain([1, 2], "honest", [0.5, 0.4])
    worth = {"loud": 0.1, "honest": 1.0}

    def value(tree: TokenTree) -> list[float]:
        return [score * worth[source] for score, source in zip(tree.scores, tree.sources, strict=True)]

    merged = merge([loud, honest], value)
    assert (merged.sources, merged.scores) == (("honest", "honest"), (0.5, 0.4))
    # Trees without scores claim a half for every further token.
    assert merge([chain([1, 2], "loud"), honest], claims).scores == (0.5, 0.4)


def test_probes_stay_apart_in_a_merged_tree() -> None:
    window = TokenTree(tokens=(1, 1, 2), parents=(-1, -1, 1), sources=("a",) * 3, scores=(0.5, 0.1, 0.1), probes=(1, 2))
    merged = merge([chain([1, 2], "b", [0.6, 0.3]), window])
    validate(merged, vocab_size=8, max_nodes=8)
    assert merged.tokens == (1, 2, 1, 2)
    assert merged.parents == (-1, 0, -1, 2)
    assert merged.probes == (2, 3)


@given(trees, st.integers(0, 24), st.integers(0, 8))
def test_prune_keeps_connected_shallow_trees(tree: TokenTree, nodes: int, depth: int) -> None:
    pruned = prune(tree, nodes, depth)
    validate(pruned, vocab_size=8, max_nodes=nodes)
    assert all(level <= depth for level in depths(pruned))
    assert paths(pruned) <= paths(tree)


def test_prune_takes_the_best() -> None:
    tree = TokenTree(tokens=(1, 2, 3, 4), parents=(-1, -1, 0, 1), sources=("a",) * 4, scores=(0.5, 0.9, 0.4, 0.8))
    assert prune(tree, 2, 9).tokens == (2, 4)
    assert prune(tree, 2, 1).tokens == (1, 2)
    assert prune(tree, 2, 9, values=(0.5, 0.1, 0.4, 0.8)).tokens == (1, 3)
    # Of equals, the earliest; without scores all are equal.
    assert prune(chain([1, 2, 3], "a"), 2, 9).tokens == (1, 2)
    assert prune(replace(tree, scores=(0.5,) * 4), 3, 9).tokens == (1, 2, 3)


def test_sampled_trees_are_not_pruned() -> None:
    q = Proposal(token_ids=(1,), probabilities=(1.0,))
    tree = TokenTree(tokens=(1, 1), parents=(ROOT, 0), sources=("a", "a"), proposals=(q, q))
    with pytest.raises(ValueError, match="sampled"):
        prune(tree, 1, 5)
    with pytest.raises(ValueError, match="merged"):
        merge([tree])


def test_descending_leaves_what_hangs_below() -> None:
    tree = TokenTree(
        tokens=(1, 2, 3, 4, 5),
        parents=(-1, -1, 0, 2, 2),
        sources=("a", "b", "c", "d", "e"),
        scores=(0.8, 0.2, 0.4, 0.2, 0.1),
    )
    left = descend(tree, [1, 3])
    assert left == TokenTree(tokens=(4, 5), parents=(-1, -1), sources=("d", "e"), scores=(0.5, 0.25))
    assert descend(tree, [1]).tokens == (3, 4, 5)  # type: ignore[union-attr]
    assert descend(tree, [1]).parents == (-1, 0, 0)  # type: ignore[union-attr]
    assert descend(tree, [1, 9]) is None
    assert descend(tree, [7]) is None
    assert len(descend(tree, [2])) == 0  # type: ignore[arg-type]
    probing = TokenTree(tokens=(1, 2, 3), parents=(-1, 0, 0), sources=("a",) * 3, probes=(2,))
    assert descend(probing, [1]).tokens == (2,)  # type: ignore[union-attr]
    # What claims more than the path before it, or than nothing, is no chance.
    for scores, left_over in (((0.2, 0.4), 1.0), ((0.0, 0.4), 0.0)):
        assert descend(chain([1, 2], "a", scores), [1]).scores == (left_over,)  # type: ignore[union-attr]


def test_claims_are_chances() -> None:
    assert claims(chain([1, 2, 3], "a", [1.5, 0.5, -0.5])) == [1.0, 0.5, 0.0]
    assert claims(replace(GOOD, parents=(-1, 0, 1))) == [0.5, 0.25, 0.125]


def test_a_tree_goes_on_where_something_is_left_of_it() -> None:
    numbers = random.Random(3)
    for _ in range(300):
        nodes = numbers.randrange(1, 9)
        parents = tuple(numbers.randrange(-1, node) for node in range(nodes))
        probes = tuple(node for node in range(nodes) if numbers.randrange(6) == 0)
        # A node below a probe is a probe.
        for node, parent in enumerate(parents):
            probes += (node,) if parent in probes and node not in probes else ()
        tree = TokenTree(
            tokens=tuple(numbers.randrange(3) for _ in range(nodes)), parents=parents, sources=("x",) * nodes, probes=probes
        )
        tokens = [numbers.randrange(3) for _ in range(numbers.randrange(4))]
        assert follow_on(tree, tokens) == (follow(tree, tokens), bool(descend(tree, tokens)))
