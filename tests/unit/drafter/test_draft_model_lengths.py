"""How long a draft model's chains get: a policy decides, and learns what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from services.drafter.draft_model.source import DraftModelSource
from services.drafter.stopping.interface import DraftedToken
from services.drafter.stopping.lengths import PlannedLength
from speculation.messages import OpenSession
from speculation.types import TokenTree
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, Target, commit, opened, source_of, wanted


@dataclass
class Recorder(PlannedLength):
    """A policy that notes what it is told."""

    length: int = 5
    until: int = 99
    begun: list[int] = field(default_factory=list)
    tokens: list[DraftedToken] = field(default_factory=list)
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    reads_distribution = True

    def open(self, message: OpenSession) -> Recorder:
        return self

    @override
    def begin(self, position: int) -> int:
        self.begun.append(position)
        return self.length

    @override
    def more(self, drafted: DraftedToken) -> bool:
        self.tokens.append(drafted)
        return drafted.step + 1 < self.until

    @override
    def observe(self, drafted: int, accepted: int) -> None:
        self.outcomes.append((drafted, accepted))


def with_policy(source: DraftModelSource, policy: Recorder, monkeypatch: pytest.MonkeyPatch) -> DraftModelSource:
    monkeypatch.setattr(source, "_stop", policy)
    return source


def test_the_policy_decides_how_long_a_chain_gets(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Recorder(until=3)
    source = with_policy(source_of(tiny_model, eagle_topk=1), policy, monkeypatch)
    answer = Target(tiny_model).answer(PROMPT, 4)
    session = opened(source, [*PROMPT, answer[0]], len(PROMPT))
    (tree,) = source.draft([wanted(session)])
    assert list(tree.tokens) == answer[1:4]
    assert policy.begun == [1]
    assert [(each.token, each.step, each.position) for each in policy.tokens] == [
        (answer[1], 0, 1), (answer[2], 1, 2), (answer[3], 2, 3),
    ]  # fmt: skip
    path = 1.0
    for each, score in zip(policy.tokens, tree.scores, strict=True):
        path *= each.probability
        assert each.path_probability == pytest.approx(path) == pytest.approx(score)
        assert len(each.top) == 10 and each.top[0] == pytest.approx(each.probability)
        assert sorted(each.top, reverse=True) == list(each.top) and 0 < each.entropy < np.log(VOCAB)
    policy.length = 0
    assert source.draft([wanted(session)]) == [TokenTree()]
    policy.length = 2
    assert [len(tree) for tree in source.draft([wanted(session)])] == [2]
    assert [len(tree) for tree in source.draft([wanted(session, 1)])] == [1]


def test_the_policy_learns_what_the_text_says(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Recorder(length=4)
    source = with_policy(source_of(tiny_model, eagle_topk=1), policy, monkeypatch)
    answer = Target(tiny_model).answer(PROMPT, 8)
    session = opened(source, PROMPT)
    source.draft([wanted(session)])
    commit(session, answer[:5])
    assert policy.outcomes == [(4, 4)]
    source.draft([wanted(session)])
    commit(session, [answer[5], answer[6], (answer[7] + 1) % VOCAB])
    assert policy.outcomes[1:] == [(4, 2)]
    # A step that decides about two tokens only, then one about the rest.
    (tree,) = source.draft([wanted(session)])
    commit(session, tree.tokens[:2])
    assert len(policy.outcomes) == 2
    commit(session, [tree.tokens[2], (tree.tokens[3] + 1) % VOCAB])
    assert policy.outcomes[2:] == [(4, 3)]
    # Two tokens are judged, and then there is another draft.
    (tree,) = source.draft([wanted(session)])
    commit(session, tree.tokens[:2])
    source.draft([wanted(session)])
    assert policy.outcomes[3:] == [(2, 2)]
