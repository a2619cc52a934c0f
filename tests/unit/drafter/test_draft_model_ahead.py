"""Drafts that a draft model makes ahead: those that it would make once the step's outcome is known."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from cluster.models.draft_kernels import KernelLM
from services.drafter.draft_model.session import LmSession
from services.drafter.draft_model.source import DraftModelSource
from services.drafter.service import DrafterService
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sessions.model_group import ModelGroup
from services.drafter.sessions.outcomes import OutcomeRanks
from services.drafter.sources.interfaces import Ahead, AheadWanted
from speculation.tree import follow
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, commit, config, opened, same, source_of, wanted
from tests.drafters.drafter_sessions import opening, report
from tests.running.patience import PATIENCE_S
from tests.tiny_models.draft_models import draft_beside


def always() -> bool:
    return True


def ahead(source: DraftModelSource, session: LmSession, most: int = 4, go_on: Callable[[], bool] = always) -> list[Ahead]:
    asked = AheadWanted(session=session, max_nodes=8, min_probability=0.0, most=most)
    (found,) = source.draft_ahead([asked], go_on)
    return found


@pytest.mark.examples(6)
@pytest.mark.parametrize("branches", [1, None, 3])
@pytest.mark.parametrize("kernels", [None, KernelLM], ids=["torch", "kernels"])
def test_they_are_those_of_the_text_that_comes(
    tiny_model: Path, branches: int | None, kernels: Callable[..., KernelLM] | None
) -> None:
    """Whichever outcome comes true, or none, and wherever drafting ahead is ended: a new session drafts the same."""
    draft = draft_beside(tiny_model)
    source, other = (source_of(tiny_model, draft, eagle_topk=branches, draft_kernels=kernels) for _ in range(2))
    chance, session, came = random.Random(5), opened(source, PROMPT), 0
    for step in range(40):
        (tree,) = source.draft([wanted(session)])
        assert tree is not None
        (new,) = other.draft([wanted(opened(other, session.tokens, len(PROMPT)))])
        assert new is not None
        assert same(tree, new)
        passes, ends = count(), chance.choice([0, 1, 2, 3, 99, 99])
        found = ahead(source, session, go_on=lambda passes=passes, ends=ends: next(passes) < ends)  # type: ignore[misc]
        for each in found:
            *path, _ = each.assumed
            assert follow(tree, path) == len(path)
            assert follow(tree, each.assumed) == len(path), "the draft holds it already"
            (expected,) = other.draft([wanted(opened(other, [*session.tokens, *each.assumed], len(PROMPT)))])
            assert expected is not None
            if ends == 99:
                assert same(each.tree, expected)
            else:
                assert follow(expected, each.tree.tokens[:1])
        if found and step % 3:
            commit(session, chance.choice(found).assumed)
            came += 1
        else:
            commit(session, [chance.randrange(VOCAB)])
    assert came > 10


def test_a_draft_that_was_made_ahead_takes_no_pass(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    source.draft([wanted(session)])
    first, *_ = ahead(source, session)
    commit(session, first.assumed)

    def planted(*_: object) -> None:
        raise AssertionError("a pass")

    with monkeypatch.context() as patched:
        patched.setattr(source._lm, "logits", planted)
        (tree,) = source.draft([wanted(session, 8)])
    assert tree == first.tree
    # The next ones are made behind it.
    assert ahead(source, session)


def test_several_sessions_at_once(tiny_model: Path) -> None:
    together, alone = source_of(tiny_model), source_of(tiny_model)
    prompts = [PROMPT[:length] for length in (1, 4, 11)]
    one, two = ([opened(source, prompt) for prompt in prompts] for source in (together, alone))
    together.draft([wanted(session) for session in one])
    for session in two:
        alone.draft([wanted(session)])
    asked = [AheadWanted(session=session, max_nodes=8, min_probability=0.0, most=3) for session in one]
    for found, session in zip(together.draft_ahead(asked, always), two, strict=True):
        own = ahead(alone, session, 3)
        assert [each.assumed for each in found] == [each.assumed for each in own]
        assert len(found) == 3
        assert all(same(left.tree, right.tree) for left, right in zip(found, own, strict=True))


def test_none_where_there_is_no_draft_for_the_text(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    assert ahead(source, session) == []
    source.draft([wanted(session)])
    commit(session, [7])
    assert ahead(source, session) == []
    # What is drawn from q must not be chosen by what comes.
    drawn = opened(source, PROMPT, temperature=1.0, sampled=True)
    source.draft([wanted(drawn)])
    assert ahead(source, drawn) == []


def test_after_a_pass_that_failed_drafts_are_right_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, other = source_of(tiny_model), source_of(tiny_model)
    session = opened(source, PROMPT)
    (tree,) = source.draft([wanted(session)])

    def planted(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(source._lm, "logits", planted)
        with pytest.raises(RuntimeError, match="planted"):
            ahead(source, session)
    assert tree is not None
    commit(session, tree.tokens[:1])
    (new,) = other.draft([wanted(opened(other, session.tokens, len(PROMPT)))])
    (again,) = source.draft([wanted(session)])
    assert new is not None
    assert again is not None
    assert same(new, again)


@pytest.mark.parametrize("texts", [(), ("prompt_lookup",)])
async def test_a_drafter_sends_them_until_the_step_is_known(tiny_model: Path, texts: tuple[str, ...]) -> None:
    """With the text sources' own, each said to be for its outcome; once it comes true, the draft is there at once."""
    service = DrafterService(replace(config(tiny_model, tiny_model), draft_ahead=3))
    session, text = "s", tuple(PROMPT)
    first = await service.open(opening(session, (*texts, "draft_model"), text))
    drafts = [draft async for draft in service.further(session)]
    own = [draft for draft in drafts if not draft.assumed]
    made = [draft for draft in drafts if draft.assumed and draft.group == "draft_model"]
    assert (len(own), len(made)) == (1, 3)
    assert (first is None) == (not texts)
    assert all((draft.base_length, draft.base_hash) == (own[0].base_length, own[0].base_hash) for draft in made)
    await service.step(report(session, made[0].assumed, text))
    again, *others = [draft async for draft in service.further(session) if draft.group == "draft_model"]
    assert others
    assert again.base_length == len(text) + len(made[0].assumed)
    assert texts or again.tree == made[0].tree
    # A report that comes while they are made ends them.
    committed = made[0].assumed
    drafting = service.further(session)
    async for draft in drafting:
        assert draft.assumed
        await service.step(report(session, (7,), (*text, *committed)))
        break
    assert [draft async for draft in drafting] == []
    await service.stop()


async def test_a_session_that_waits_ends_them(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    begun, goes_on = threading.Event(), threading.Event()
    asked: list[bool] = []

    class Watched:
        open, draft, forget = source.open, source.draft, source.forget

        def draft_ahead(self, batch: Sequence[AheadWanted], go_on: Callable[[], bool]) -> list[list[Ahead]]:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            asked.append(go_on())
            return source.draft_ahead(batch, go_on)

    group = ModelGroup("draft_model", Watched)
    group.open(opening("one"))
    group.open(opening("two"))
    await group.draft("one", 8, 0.0, KnownStates())
    ahead = group.ahead("one", 8, 0.0, 2)
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    draft = group.draft("two", 8, 0.0, KnownStates())
    goes_on.set()
    assert await ahead == []
    assert await draft
    assert asked == [False]
    # Nobody waits for those of a session that has ended, or that wants no nodes.
    assert await group.ahead("one", 0, 0.0, 2) == ()
    waiting = group.ahead("one", 8, 0.0, 2)
    group.close("one")
    assert await waiting == ()
    await group.ended()


def test_outcomes_that_never_come_true_are_drafted_for_in_trials_only() -> None:
    ranks = OutcomeRanks(4)
    assert ranks.wanted() == 4
    for _ in range(400):
        ranks.learn([(1, 2), (1, 3), (4,), (5,)], (1, 3, 9))
    asked = [ranks.wanted() for _ in range(64)]
    assert (min(asked), max(asked), asked.count(4)) == (2, 4, 2)
    for _ in range(400):
        ranks.learn([(1, 2), (1, 3), (4,), (5,)], (8,))
    assert ranks.wanted() == 1
