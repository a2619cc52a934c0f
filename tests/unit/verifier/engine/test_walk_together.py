"""How far choices go down the trees of a pass is found for all requests in one call, as the walk finds it for each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.verifier.engine.finishing import _decided, _decided_alone, make_verdicts
from services.verifier.engine.native import walks
from services.verifier.engine.native.library import engine_library
from services.verifier.engine.native.walks import walk_together
from services.verifier.engine.passes import Part, PassWork
from services.verifier.engine.singles import Singles
from services.verifier.engine.treed import Treed
from services.verifier.engine.verify import verify, verify_together
from services.verifier.model.target_port import NOT_CHOSEN, Outcome
from services.verifier.model.tree_rows import TreeOutcomes
from speculation.acceptance import StopRule, walk
from speculation.errors import Internal
from speculation.types import EMPTY_TREE, TokenLogprobs, TokenTree, Verdict
from tests.engine.fakes import random_tree
from tests.unit.verifier.engine.test_singles import live

# So few tokens that choices often are among a node's children, twice among them too.
FEW = 4
compiled = pytest.mark.skipif(engine_library() is None, reason="there is no compiler")


def tree_of(draw: random.Random) -> TokenTree:
    """One with nodes."""
    found = random_tree(draw, 9, FEW)
    while not found.tokens:
        found = random_tree(draw, 9, FEW)
    return found


def outcome_of(draw: random.Random, tree: TokenTree) -> Outcome:
    """What a target might choose, here and there nothing."""
    choices = tuple(NOT_CHOSEN if draw.random() < 0.1 else draw.randrange(FEW) for _ in range(1 + len(tree)))
    top = tuple((draw.randrange(FEW), 1) for _ in choices) if draw.random() < 0.5 else ()
    return Outcome(choices=choices, top_ids=top, error=Internal("planted") if draw.random() < 0.5 else None)


@compiled
@pytest.mark.parametrize("seed", range(60))
def test_paths_are_those_of_the_walk(seed: int) -> None:
    draw = random.Random(seed)
    trees = [tree_of(draw) for _ in range(draw.randint(1, 12))]
    outcomes = [outcome_of(draw, tree) for tree in trees]
    never = StopRule(stop_token_ids=frozenset(), generated=0, room=100)
    found = walk_together(
        [len(tree) for tree in trees],
        [token for tree in trees for token in (0, *tree.tokens)],
        [parent for tree in trees for parent in tree.parents],
        [choice for outcome in outcomes for choice in outcome.choices],
    )
    assert found is not None
    for path, tokens, tree, outcome in zip(*found, trees, outcomes, strict=True):
        accepted = walk(tree, lambda node, choices=outcome.choices: choices[node + 1], never)  # type: ignore[misc]
        assert (path, tokens) == (accepted.path, accepted.tokens)


@compiled
@pytest.mark.parametrize("seed", range(60))
def test_verdicts_are_those_of_verify(seed: int) -> None:
    draw = random.Random(seed)
    requests = [live(draw, number) for number in range(draw.randint(1, 12))]
    trees = [tree_of(draw) for _ in requests]
    outcomes = [outcome_of(draw, tree) for tree in trees]
    together = verify_together(requests, trees, outcomes)
    for request, tree, outcome, found in zip(requests, trees, outcomes, together, strict=True):
        try:
            verdict = verify(request, tree, outcome)
        except Exception:
            assert found is None
            continue
        assert found == (verdict if verdict.finish_reason is None else None)


def parts_of(seed: int) -> tuple[list[Part], list[Outcome]]:
    """Some have no tree, prompt rows, probes, or want log-probabilities."""
    draw = random.Random(seed)
    parts, outcomes = [], []
    for number in range(12):
        part = Part(request=live(draw, number), chain=1, verified=True, tree=tree_of(draw))
        kind = draw.randrange(10)
        if kind == 0:
            part.tree = TokenTree()
        elif kind == 1:
            part.tree = replace(part.tree, probes=(len(part.tree) - 1,))
        elif kind == 2:
            part.chain = 3
        outcome = outcome_of(draw, part.tree)
        if kind == 2 and draw.random() < 0.5:
            part.verified, outcome = False, Outcome()
        elif kind == 3:
            outcome = replace(outcome, logprobs=lambda row, token: TokenLogprobs(token_id=token, logprob=float(row)))
        elif kind == 4:
            outcome = replace(outcome, choices=outcome.choices[:1])
        parts.append(part)
        outcomes.append(outcome)
    return parts, outcomes


def told(part: Part) -> tuple[Verdict | None, type[Exception] | None]:
    return part.verdict, None if part.error is None else type(part.error)


@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_a_pass_is_decided_as_each_part_alone(seed: int, without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if without:
        monkeypatch.setattr(walks, "engine_library", lambda: None)
    (parts, outcomes), (others, _) = parts_of(seed), parts_of(seed)
    kept = _decided(PassWork(Singles([]), parts), outcomes)
    assert kept == [_decided_alone(part, outcome) for part, outcome in zip(others, outcomes, strict=True)]
    assert [told(part) for part in parts] == [told(part) for part in others]


@compiled
@pytest.mark.parametrize("seed", range(60))
def test_parts_by_columns_are_decided_as_each_alone(seed: int) -> None:
    """Some trees are empty, and some answers end."""
    draw = random.Random(seed)
    parts = [
        Part(request=live(draw, number), chain=1, verified=True, tree=tree_of(draw) if draw.random() < 0.9 else EMPTY_TREE)
        for number in range(draw.randint(1, 12))
    ]
    treed = Treed([part.request for part in parts], [part.tree for part in parts], quiet=False)
    ids = [draw.randrange(FEW) for _ in treed.rows.tokens]
    tops = [tuple((draw.randrange(FEW), 1) for _ in range(1 + len(part.tree))) * draw.randrange(2) for part in parts]
    outcomes = TreeOutcomes(treed.rows, ids, tops)
    others = [Part(request=part.request, chain=1, verified=True, tree=part.tree) for part in parts]
    kept = [_decided_alone(part, outcome) for part, outcome in zip(others, outcomes, strict=True)]
    work = PassWork(Singles([]), parts, treed)
    assert _decided(work, outcomes) is None
    make_verdicts(work)
    assert [told(part) for part in parts] == [told(part) for part in others]
    assert treed.walked is not None
    assert [[0, *[1 + node for node in path]] for path in treed.walked.paths] == kept
