"""A model in the blend: its probabilities compete with what text sources say, at every node, once its tree is there."""

from __future__ import annotations

import random

import pytest
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.service import DrafterService
from services.drafter.sessions.tree_walk import TreeWalk, prior_of
from speculation.messages import Draft, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import ROOT, chain, path_to
from speculation.types import Proposal, TokenTree
from tests.drafters.model_source import NAME, ModelDouble, register
from tests.unit.drafter.test_blend import Table, paths

TREE = TokenTree(tokens=(5, 6, 7, 8), parents=(-1, -1, 0, 2), sources=("m",) * 4, scores=(0.6, 0.1, 0.3, 0.29))


def committed(*tokens: int) -> StepReport:
    return StepReport(session_id="s", committed=tokens, length=0, prefix_hash=0, accepted_path=(), max_nodes=8)


def test_a_candidate_is_known_by_its_probability_and_depth() -> None:
    walk = TreeWalk("m")
    assert walk.start() is None
    walk.take(TREE)
    place = walk.start()
    assert place == (ROOT, 0)
    assert dict(walk.candidates(place)) == {5: "m:1:1", 6: "m:1:6"}
    below = walk.follow(place, 5)
    assert below is not None and walk.follow(place, 9) is None
    # A half of its parent, and nearly all of that.
    assert dict(walk.candidates(below)) == {7: "m:2:2"}
    deeper = walk.follow(below, 7)
    assert deeper is not None and dict(walk.candidates(deeper)) == {8: "m:2:0"}
    prior = prior_of("m")
    assert {"m:1:1", "m:1:6", "m:2:2", "m:2:0", "m:4:11"} <= prior.keys()
    assert all(0 < probability < 1 for probability in prior.values())
    walk.observe(committed(5))
    assert walk.start() is None and not list(walk.candidates(place))


def blend(after: dict[int, list[tuple[int, str]]]) -> tuple[BlendSession, Calibrator, Calibrator]:
    alone = Calibrator({"a:0": 0.5})
    joint = Calibrator({"a:0": 0.5} | prior_of("m"))
    return BlendSession({"x": Table(0, after)}, alone, {"m": TreeWalk("m")}, lambda _: joint), alone, joint


def test_one_tree_of_both_and_each_continues_the_others_paths() -> None:
    session, _, _ = blend({0: [(1, "a:0")], 5: [], 7: [(9, "a:0")]})
    assert set(paths(session.draft(8))) == {(1,)}
    session.take("m", TREE)
    tree = session.draft(8)
    assert set(paths(tree)) == {(1,), (5,), (6,), (5, 7), (5, 7, 8), (5, 7, 9)}
    by_path = {tuple(tree.tokens[i] for i in path_to(tree, node)): tree.sources[node] for node in range(len(tree))}
    assert by_path[5, 7, 9] == "x" and by_path[5, 7, 8] == "m"
    # For the next prefix, the model has not spoken yet.
    session.observe(committed(0))
    assert set(paths(session.draft(8))) == {(1,)}


def test_drafts_with_and_without_the_model_are_learnt_apart() -> None:
    session, alone, joint = blend({0: [(1, "a:0")]})
    numbers = random.Random(3)
    for _ in range(400):
        session.draft(8)
        if numbers.random() < 0.5:
            session.take("m", chain([5], "m", [0.9]))
            session.draft(8)
            # Wherever the model speaks, it is right.
            session.observe(committed(5, 0))
        else:
            session.observe(committed(1, 0))
    assert alone.probabilities([(1, ("a:0",))])[0] > 0.9
    right, other = joint.probabilities([(5, ("m:1:0",)), (1, ("a:0",))])
    assert right > 0.9 and other < 0.1


async def test_the_draft_after_the_models_answer_holds_both(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the model says was said before, with a continuation that the model does not name.
    double = register(monkeypatch, ModelDouble(answer=(7,)))
    text = (7, 8, 9, 1, 2, 3, 4)
    service = DrafterService(DrafterConfig())
    opening = OpenSession(
        session_id="s", tokens=text, prompt_length=len(text), sources=("suffix", "recycling", NAME), max_nodes=8
    )
    first = await service.open(opening)
    assert isinstance(first, Draft) and first.group == "text" and first.more
    (later,) = [draft async for draft in service.further("s")]
    assert (later.group, later.more, later.base_hash) == (NAME, False, extend_hash(EMPTY_HASH, text))
    assert {(7,), (7, 8), (7, 8, 9)} <= set(paths(later.tree))
    assert later.tree.sources[later.tree.tokens.index(7)] in (NAME, "suffix", "recycling")
    assert double.batches == [["s"]]


async def test_a_tree_drawn_from_q_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = TokenTree(
        tokens=(7,), parents=(-1,), sources=(NAME,), proposals=(Proposal(token_ids=(7, 8), probabilities=(0.5, 0.5)),)
    )

    class Drawing(ModelDouble):
        @override
        def _draft(self, wanted: object) -> TokenTree:
            return drawn

    register(monkeypatch, Drawing())
    service = DrafterService(DrafterConfig())
    await service.open(
        OpenSession(session_id="s", tokens=(7, 8, 7), prompt_length=3, sources=("suffix", NAME), max_nodes=8, sampled=True)
    )
    assert [draft.tree async for draft in service.further("s")] == [drawn]
