"""Drafts that a head of hidden states makes ahead: by what it feeds back to itself, since the target's states have not come."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from services.drafter.heads.eagle.source import FeatureSource, TreeForm
from services.drafter.heads.files.head_config import HeadConfig
from services.drafter.heads.session import FeatureSession
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import Ahead, AheadWanted
from speculation.tree import ROOT, children, depths, follow, path_to, validate
from tests.drafters.feature_sources import (
    EAGLE,
    HEADS,
    draft,
    fresh,
    head,
    known,
    log_q,
    opening,
    report,
    same,
    source,
    text,
)


def always() -> bool:
    return True


def opened(own: FeatureSource, length: int = 9) -> FeatureSession:
    return own.open(opening(text(length), prompt_length=1))


def ahead(own: FeatureSource, *sessions: FeatureSession, go_on: Callable[[], bool] = always) -> list[list[Ahead]]:
    asked = [AheadWanted(session=session, max_nodes=9, min_probability=0.0, most=3) for session in sessions]
    return own.draft_ahead(asked, go_on)


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    "form", [TreeForm(steps=3, width=4), TreeForm(dynamic=12, steps=3, width=4)], ids=["best", "eagle2"]
)
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_they_have_the_probabilities_of_the_head(config: HeadConfig, form: TreeForm) -> None:
    own, tokens, held = head(config), text(9), known(range(8), config=config)
    made = source(config, form=form, ahead=True)
    session = opened(made)
    tree = draft(made, session, held, 12)
    (found,) = ahead(made, session)
    assert len(found) == 3
    for each in found:
        *path, _ = each.assumed
        assert follow(tree, each.assumed) == len(path), "the draft has this path, and not the token behind it"
        validate(each.tree, vocab_size=1 << 20, max_nodes=9, sources=["eagle", "eagle3", "fspad"])
        assert max(depths(each.tree)) >= 2
        scores = {ROOT: 1.0, **dict(enumerate(each.tree.scores))}
        for parent, nodes in children(each.tree).items():
            above = (*each.assumed, *(each.tree.tokens[node] for node in path_to(each.tree, parent)))
            logs = log_q(own, tokens, held, above)
            assert [each.tree.tokens[node] for node in nodes] == logs.topk(len(nodes)).indices.tolist()
            for node in nodes:
                expected = scores[parent] * float(logs[each.tree.tokens[node]].exp())
                assert each.tree.scores[node] == pytest.approx(expected, rel=1e-3)
    # The likeliest of what the draft leaves over.
    chances = [chance(config, tokens, held, each.assumed) for each in found]
    assert chances == sorted(chances, reverse=True)


def chance(config: HeadConfig, tokens: list[int], held: KnownStates, path: tuple[int, ...]) -> float:
    own = head(config)
    return sum(float(log_q(own, tokens, held, path[:at])[path[at]]) for at in range(len(path)))


def test_the_next_drafts_are_what_they_would_be_without() -> None:
    own, other = source(ahead=True), source()
    session, plain = opened(own), opened(other)
    for step in range(12):
        held = known(range(8 + 2 * step))
        one, two = draft(own, session, held), draft(other, plain, held)
        same(one, two)
        passes, ends = count(), step % 4
        (found,) = ahead(own, session, go_on=lambda passes=passes, ends=ends: next(passes) < ends)  # type: ignore[misc]
        assert ends < 3 or found
        # Once for a text.
        assert ahead(own, session) == [[]]
        for each in (session, plain):
            report(each, [one.tokens[0], 3 + step])
    same(draft(own, session, known(range(32))), fresh(source(), session.tokens, known(range(32))))


def test_several_sessions_at_once() -> None:
    own = source(ahead=True)
    alone = []
    for length in (5, 9, 30):
        one = opened(own, length)
        draft(own, one, known(range(length - 1)))
        alone += ahead(own, one)
    sessions = [opened(own, length) for length in (5, 9, 30)]
    for session in sessions:
        draft(own, session, known(range(len(session.tokens) - 1)))
    none = opened(own)
    together = ahead(own, sessions[0], none, *sessions[1:])
    assert together.pop(1) == []
    for found, expected in zip(together, alone, strict=True):
        assert [each.assumed for each in found] == [each.assumed for each in expected]
        for left, right in zip(found, expected, strict=True):
            same(left.tree, right.tree)


def test_none_without_what_they_are_made_of() -> None:
    own = source(ahead=True, most_bytes=1)
    first, second = opened(own), opened(own)
    draft(own, first, known(range(8)))
    # The first one's rows had to make room.
    draft(own, second, known(range(8)))
    assert ahead(own, first) == [[]]
    assert len(*ahead(own, second)) == 3
    draft(own, second, known(range(8)))
    report(second, [5])
    assert ahead(own, second) == [[]]
    # What is drawn from q must not be chosen by what comes.
    drawn = own.open(opening(text(9), prompt_length=1, temperature=1.0, sampled=True))
    draft(own, drawn, known(range(8)))
    assert ahead(own, drawn) == [[]]
    # Nobody wants any.
    unasked = source(EAGLE)
    session = opened(unasked)
    draft(unasked, session, known(range(8)))
    assert session.drafted is None
