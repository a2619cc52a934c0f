"""The mailbox of drafts: what fits, what came ahead, what came too late and is of use all the same."""

from __future__ import annotations

from services.verifier.engine.mailbox import Mailbox
from speculation.messages import Draft
from speculation.tree import chain
from speculation.types import Proposal, TokenTree

TEXT = [1, 2, 3]


def mailbox() -> Mailbox:
    return Mailbox(TEXT)


def draft(drafts: Mailbox, tree: TokenTree, assumed: tuple[int, ...] = ()) -> Draft:
    return Draft(session_id="s", base_length=len(TEXT), base_hash=drafts.prefix_hash, assumed=assumed, tree=tree)


def test_a_draft_ahead_waits_for_its_step() -> None:
    drafts = mailbox()
    drafts.add(draft(drafts, chain([7], "x"), assumed=(4, 5)))
    assert drafts.ahead
    assert not drafts.ready(TEXT)
    drafts.commit(5, (4, 5))
    assert drafts.take([*TEXT, 4, 5], 8, 8).tokens == (7,)
    found = drafts.count_step([*TEXT, 4, 5])
    assert found is not None
    assert found.assumed == (4, 5)


def test_of_a_late_draft_what_is_left_is_used() -> None:
    drafts = mailbox()
    drafts.add(draft(drafts, chain([4, 5, 6], "x", [0.8, 0.4, 0.2])))
    drafts.commit(4, (4,))
    text = [*TEXT, 4]
    assert not drafts.ready(text)
    assert drafts.worth_waiting(text)
    left = drafts.take(text, 8, 8)
    assert left.tokens == (5, 6)
    assert left.scores == (0.5, 0.25)
    assert drafts.count_step(text) is not None


def test_the_right_draft_comes_before_a_late_one() -> None:
    drafts = mailbox()
    late = draft(drafts, chain([4, 5, 6], "x"))
    drafts.commit(4, (4,))
    drafts.add(Draft(session_id="s", base_length=4, base_hash=drafts.prefix_hash, tree=chain([9], "x")))
    drafts.add(late)
    assert drafts.take([*TEXT, 4], 8, 8).tokens == (9,)


def test_what_went_elsewhere_is_of_no_use() -> None:
    drafts = mailbox()
    drafts.add(draft(drafts, chain([4, 5], "x")))
    drafts.add(draft(drafts, chain([4, 5], "x"), assumed=(8,)))
    drafts.commit(4, (7,))
    assert len(drafts.take([*TEXT, 7], 8, 8)) == 0
    assert drafts.count_step([*TEXT, 7]) is None


def test_sampled_drafts_are_used_whole_or_not_at_all() -> None:
    drafts = mailbox()
    q = Proposal(token_ids=(4,), probabilities=(1.0,))
    tree = TokenTree(tokens=(4, 4), parents=(-1, 0), sources=("x", "x"), proposals=(q, q))
    drafts.add(draft(drafts, tree))
    assert len(drafts.take(TEXT, 1, 8)) == 0
    assert len(drafts.take(TEXT, 2, 8)) == 2
    drafts.commit(4, (4,))
    assert len(drafts.take([*TEXT, 4], 8, 8)) == 0


def test_many_drafts_ahead_push_none_of_the_same_step_out() -> None:
    drafts = mailbox()
    drafts.add(draft(drafts, chain([4], "x")))
    for token in range(20):
        drafts.add(draft(drafts, chain([5], "x"), assumed=(token,)))
    assert drafts.take(TEXT, 8, 8).tokens == (4,)
