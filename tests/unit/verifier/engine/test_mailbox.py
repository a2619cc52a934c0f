"""The mailbox of drafts: what fits, what came ahead, what came too late and is of use all the same, and what is missing."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from random import Random

import pytest

from services.verifier.engine.deciding.waiting import Experience
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.prefixes import Prefixes
from speculation.messages import Draft
from speculation.tree import chain, claims, path_to
from speculation.types import Plan, Proposal, TokenTree
from tests.engine.fakes import random_tree, request

TEXT = [1, 2, 3]
REJECTION = Plan(strategy="test", sources=("x",), max_nodes=2, acceptance="rejection")


class Box:
    """A request with one mailbox, or several."""

    def __init__(self, *names: str, plan: Plan | None = None) -> None:
        wanted = request("s", TEXT, plan or Plan(strategy="test", sources=("x",), max_nodes=8), max_tokens=100)
        self.live = LiveRequest(wanted, frozenset(), vocab_size=100, max_model_len=500, max_nodes=8, by_paper=False)
        self.experience: dict[str, Experience] = {}
        for name in names or ("one",):
            self.live.mailboxes[name] = Mailbox(self.live.prefixes, self._experience)

    def _experience(self, group: str) -> Experience:
        return self.experience.setdefault(group, Experience(0.02))

    @property
    def mailbox(self) -> Mailbox:
        return self.live.mailboxes["one"]

    def put(self, tree: TokenTree, name: str = "one", now: float = 0.0, **changes: object) -> None:
        made = Draft(session_id="s", base_length=len(TEXT), base_hash=Prefixes(TEXT).hash, tree=tree)
        self.live.mailboxes[name].add(replace(made, **changes), self.live.tokens, 8, now)  # type: ignore[arg-type]

    def ready(self, tokens: list[int]) -> bool:
        return any(not found.late for found in self.mailbox.find(tokens))

    def take(self) -> TokenTree:
        return self.live.take_tree(claims)


def test_a_draft_ahead_waits_for_its_step() -> None:
    box = Box()
    box.put(chain([7], "x"), assumed=(4, 5))
    assert box.mailbox.ahead
    assert not box.ready(TEXT)
    box.live.commit((4, 5))
    assert box.take().tokens == (7,)
    (found,) = box.mailbox.find([*TEXT, 4, 5])
    assert found.draft.assumed == (4, 5)


def test_of_a_late_draft_what_is_left_is_used() -> None:
    box = Box()
    box.put(chain([4, 5, 6], "x", [0.8, 0.4, 0.2]))
    box.live.commit((4,))
    text = [*TEXT, 4]
    assert not box.ready(text)
    box.mailbox.asked(len(text), 0.0)
    assert box.mailbox.missing(text)
    left = box.take()
    assert left.tokens == (5, 6)
    assert left.scores == (0.5, 0.25)
    assert [found.late for found in box.mailbox.find(text)] == [True]


def test_the_right_draft_comes_before_a_late_one() -> None:
    box = Box()
    box.live.commit((4,))
    box.put(chain([9], "x"), base_length=4, base_hash=box.live.prefixes.hash)
    box.put(chain([4, 5, 6], "x"))
    assert box.take().tokens == (9,)


def test_what_went_elsewhere_is_of_no_use() -> None:
    box = Box()
    box.put(chain([4, 5], "x"))
    box.put(chain([4, 5], "x"), assumed=(8,))
    box.live.commit((7,))
    assert len(box.take()) == 0
    assert box.mailbox.find([*TEXT, 7]) == []


def test_sampled_drafts_are_used_whole_or_not_at_all() -> None:
    q = Proposal(token_ids=(4,), probabilities=(1.0,))
    tree = TokenTree(tokens=(4, 4), parents=(-1, 0), sources=("x", "x"), proposals=(q, q))
    narrow, wide = Box(plan=replace(REJECTION, max_nodes=1)), Box(plan=REJECTION)
    for box in (narrow, wide):
        box.put(tree)
    assert len(narrow.take()) == 0
    assert wide.take() == tree
    wide.live.commit((4,))
    assert len(wide.take()) == 0


def test_a_sampled_draft_is_merged_with_nothing() -> None:
    q = Proposal(token_ids=(4, 5), probabilities=(0.5, 0.5))
    sampled = TokenTree(tokens=(4,), parents=(-1,), sources=("x",), proposals=(q,))
    box = Box("one", "two", plan=REJECTION)
    box.put(chain([9], "x"))
    box.put(sampled, "two")
    assert box.take() == sampled
    # Under the walk what was sampled is a guess like others.
    walked = Box("one", "two")
    walked.put(chain([9], "x"))
    walked.put(sampled, "two")
    assert sorted(walked.take().tokens) == [4, 9]
    assert not walked.take().proposals


def test_many_drafts_ahead_push_none_of_the_same_step_out() -> None:
    box = Box()
    box.put(chain([4], "x"))
    for token in range(20):
        box.put(chain([5], "x"), assumed=(token,))
    assert box.take().tokens == (4,)


def test_drafts_of_all_origins_and_groups_become_one_tree_of_the_best_paths() -> None:
    box = Box("one", "two")
    box.put(chain([4, 5], "text", [0.5, 0.2]), group="text", more=True)
    box.put(chain([4, 6], "model", [0.9, 0.8]), group="model")
    box.put(chain([7, 8], "far", [0.4, 0.1]), "two")
    tree = box.take()
    # Whoever gives a node the higher probability is who has proposed it.
    proposed = {
        tuple(tree.tokens[at] for at in path_to(tree, node)): (tree.sources[node], tree.scores[node]) for node in range(5)
    }
    assert proposed == {
        (4,): ("model", 0.9), (4, 5): ("text", 0.2), (4, 6): ("model", 0.8), (7,): ("far", 0.4), (7, 8): ("far", 0.1),
    }  # fmt: skip
    best = Box("one", "two", plan=Plan(strategy="test", sources=("x",), max_nodes=3))
    best.put(chain([4, 5], "text", [0.5, 0.2]))
    best.put(chain([7, 8], "far", [0.4, 0.3]), "two")
    assert best.take().tokens == (4, 7, 8)


def test_a_later_draft_of_a_group_replaces_the_earlier() -> None:
    box = Box()
    box.put(chain([4], "x"), group="model")
    box.put(chain([5], "x"), group="model")
    assert box.take().tokens == (5,)


def test_what_is_missing_is_known_by_group() -> None:
    box = Box()
    box.mailbox.opened(3, now=0.0)
    assert box.mailbox.missing(TEXT) == {"": 0.0}
    box.put(chain([4], "x"), group="text", more=True)
    # Nobody knows yet who else drafts.
    assert box.mailbox.missing(TEXT) == {}
    box.put(chain([4], "x"), group="model")
    assert box.mailbox.missing(TEXT) == {}
    box.live.commit((4,))
    text = box.live.tokens
    assert box.mailbox.missing(text) == {}, "nothing was asked for"
    box.mailbox.asked(4, now=1.0)
    assert box.mailbox.missing(text) == {"text": 1.0, "model": 1.0}
    base = {"base_length": 4, "base_hash": box.live.prefixes.hash}
    box.put(chain([5], "x"), group="text", more=True, now=1.001, **base)
    assert box.mailbox.missing(text) == {"model": 1.0}
    box.put(chain([5], "x"), group="model", now=1.02, **base)
    assert box.mailbox.missing(text) == {}
    for group, took in (("text", 0.001), ("model", 0.02)):
        (left,) = box.experience[group].left(0.0)
        assert math.isclose(left, took, abs_tol=1e-3)


def test_a_group_is_missing_before_its_first_draft() -> None:
    box = Box()
    box.mailbox.opened(3, now=0.0, groups=("model", "text"))
    assert box.mailbox.missing(TEXT) == {"model": 0.0, "text": 0.0}
    box.put(chain([4], "x"), group="text", more=True)
    assert box.mailbox.missing(TEXT) == {"model": 0.0}
    box.live.commit((4,))
    box.mailbox.asked(4, now=1.0)
    assert box.mailbox.missing(box.live.tokens) == {"model": 1.0, "text": 1.0}
    box.mailbox.leave_out({"model"})
    box.mailbox.asked(4, now=2.0)
    assert box.mailbox.missing(box.live.tokens) == {"text": 2.0}


def test_nobody_waits_for_the_usual_groups_of_who_has_others() -> None:
    box = Box()
    box.mailbox.opened(3, now=0.0, groups=("model", "text"))
    box.put(chain([4], "x"), group="mine", more=True)
    assert box.mailbox.missing(TEXT) == {}
    box.live.commit((4,))
    box.mailbox.asked(4, now=1.0)
    assert box.mailbox.missing(box.live.tokens) == {"mine": 1.0}


def test_none_is_asked_of_who_has_not_answered() -> None:
    box = Box()
    box.mailbox.opened(3, now=0.0)
    assert not box.mailbox.asks(0.1)
    box.put(chain([4], "x"))
    assert box.mailbox.asks(0.1)
    box.mailbox.asked(4, 0.1)
    assert not box.mailbox.asks(0.2)
    # What is lost is asked for again.
    assert box.mailbox.asks(9.0)


def test_what_drafts_would_have_brought_is_known_of_late_ones_too() -> None:
    box = Box()
    box.mailbox.opened(3, now=0.0)
    box.live.commit((4, 5))
    before = box.mailbox.worth("").in_time.value
    box.put(chain([4, 5, 6, 7], "x"))
    assert box.mailbox.worth("").in_time.value > before
    wrong = Box()
    wrong.mailbox.opened(3, now=0.0)
    wrong.put(chain([9], "x"))
    wrong.live.commit((4, 5))
    assert wrong.mailbox.worth("").in_time.value < before


def test_late_drafts_of_which_nothing_is_left_are_known_to_bring_nothing() -> None:
    for tree, committed in (([9], (4, 5)), ([4], (4,))):
        box = Box()
        box.experience[""] = Experience(0.02)
        box.experience[""].worth.late.value = 3.0
        box.mailbox.opened(3, now=0.0)
        box.live.commit(committed)
        box.put(chain(tree, "x"))
        assert box.mailbox.worth("").late.value < 1.5


def test_a_draft_that_came_during_the_pass_tells_what_it_would_bring_a_step_later() -> None:
    for tree, brings in (([9], 0), ([4, 5, 6, 9], 2)):
        box = Box()
        box.experience[""] = Experience(0.02)
        box.mailbox.opened(3, now=0.0)
        box.put(chain(tree, "x"))
        before = box.mailbox.worth("").late.value
        box.mailbox.learn(TEXT, (4, 5, 6, 7), 8)
        weight = 1 / 1.5
        assert math.isclose(box.mailbox.worth("").late.value, before + weight * (brings - before))


@pytest.mark.parametrize("seed", range(200))
def test_what_is_left_after_a_step_is_what_a_search_of_all_drafts_finds(seed: int) -> None:
    draw, box = Random(seed), Box()
    for number in range(draw.randrange(4)):
        tree = random_tree(draw, draw.randrange(5), 4)
        ahead = tuple(draw.randrange(4) for _ in range(draw.choice((0, 0, 1, 2))))
        known = draw.choice((Prefixes(TEXT).hash,) * 3 + (7,))
        box.put(tree, assumed=ahead, group=draw.choice("ab"), now=float(number), base_hash=known)
    # Found as they came, mostly.
    assert box.mailbox.find(TEXT) == box.mailbox._find(TEXT)
    committed = tuple(draw.randrange(4) for _ in range(draw.randrange(1, 4)))
    fresh = copy(box.mailbox)
    fresh._kept = fresh._kept.copy()
    box.live.commit(committed)
    assert box.mailbox.find(box.live.tokens) == fresh._find(box.live.tokens)
    worths = [box.mailbox.worth(found.draft.group).of(late=found.late) for found in box.live.drafts() if found.tree.tokens]
    assert box.live.expected() == max(worths, default=0.0)


def test_a_draft_that_could_not_be_made_yet_says_nothing_about_its_worth() -> None:
    for unready, worth in ((True, 1.0), (False, 1 / 3)):
        box = Box()
        box.mailbox.asked(len(TEXT), 0.0)
        box.put(chain([], "x"), unready=unready, now=9.0)
        # Nobody waits for it any more.
        assert not box.mailbox.missing(TEXT)
        box.mailbox.learn(TEXT, (4,), 8)
        assert math.isclose(box.mailbox.worth("").in_time.value, worth)
        assert (box.experience[""].typical_s == Experience(0.02).typical_s) == unready
