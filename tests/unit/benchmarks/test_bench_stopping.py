"""The comparison of stopping policies: what it counts, and that it sees a policy that stops too late."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from typing_extensions import override

from benchmarks.bench.records import Request
from benchmarks.stopping.report import (
    PolicySummary,
    area_under_roc,
    comparison_object,
    cost_of_a_draft,
    f1_of,
    length_table,
    policy_table,
    summaries,
)
from benchmarks.stopping.run import ORACLE, PLAIN, ChainDecoder, ChainStep, Comparison, StopContestant, compare_policies
from services.drafter.sources.interfaces import DraftWanted
from services.drafter.stopping.confidence import Confidence
from services.drafter.stopping.interface import DraftedToken, StopPolicy, StopState
from services.drafter.stopping.lengths import Heuristic, Static
from services.drafter.stopping.oracle import Oracle, OracleState
from services.verifier.model.target_port import Outcome
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession, StepReport
from speculation.tree import chain
from speculation.types import SamplingParams, TokenTree
from tests.engine.fakes import ToyTarget
from tests.running.refusals import refuses

PROMPTS = tuple((3, 5, 7, n) for n in range(1, 5))
REQUESTS = tuple(Request(id=str(n), task="toy", prompt=prompt, seed=n) for n, prompt in enumerate(PROMPTS))


class KnowsTheText:
    """A ``ModelSource`` that drafts an answer's own tokens, and another one at ``wrong`` positions. Behind those, nonsense."""

    def __init__(self, policy: StopPolicy, answers: dict[tuple[int, ...], Sequence[int]], wrong: Collection[int]) -> None:
        self.policy = policy
        self.answers = answers
        self.wrong = wrong

    def open(self, message: OpenSession) -> _Session:
        return _Session(self, message)

    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree]:
        return [wanted.session.draft(wanted.max_nodes) for wanted in batch]

    def forget(self, tenant: str) -> None:
        """Nothing is kept."""


class _Session:
    def __init__(self, source: KnowsTheText, message: OpenSession) -> None:
        self.answer = source.answers[message.tokens[: message.prompt_length]]
        self.wrong = source.wrong
        self.at = len(message.tokens) - message.prompt_length
        self.stop = source.policy.open(message)
        self.drafted = 0

    def draft(self, max_nodes: int) -> TokenTree:
        tokens: list[int] = []
        most = min(max_nodes, self.stop.begin(self.at))
        right = True
        while len(tokens) < most:
            here = self.at + len(tokens)
            right = right and here not in self.wrong
            tokens.append(self.answer[here] if right else (self.answer[here] + 1) % 16)
            q = 0.9 if right else 0.2
            step = len(tokens) - 1
            if not self.stop.more(
                DraftedToken(token=tokens[-1], step=step, position=here, probability=q, path_probability=q)
            ):
                break
        self.drafted = len(tokens)
        return chain(tokens, "draft_model", [0.9] * len(tokens))

    def observe(self, report: StepReport) -> None:
        if self.drafted:
            self.stop.observe(self.drafted, len(report.accepted_path))
        self.drafted = 0
        self.at += len(report.committed)

    def close(self) -> None:
        """Nothing is held."""


def compared(
    contestants: Sequence[StopContestant],
    wrong: Collection[int],
    target: ToyTarget | None = None,
    requests: Sequence[Request] = REQUESTS,
    max_tokens: int = 40,
    longest: int = 64,
    **params: float,
) -> Comparison:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    plain = ChainDecoder(ToyTarget(), _nothing, "draft_model", sampling, longest)
    answers = {
        request.prompt: plain.answer(request, None, StopContestant(name=PLAIN, make=None)).tokens for request in requests
    }
    decoder = ChainDecoder(
        target or ToyTarget(), lambda policy: KnowsTheText(policy, answers, wrong), "draft_model", sampling, longest
    )
    return compare_policies(decoder, requests, contestants, repeats=2, longest=longest)


def _nothing(policy: StopPolicy) -> KnowsTheText:
    raise AssertionError("plain decoding asked for a draft")


def static(length: int) -> StopContestant:
    return StopContestant(name=f"static {length}", make=lambda: Static(length))


CONTESTANTS = (
    static(5),
    StopContestant(name="heuristic", make=lambda: Heuristic(5, transient=False)),
    StopContestant(name="confidence", make=lambda: Confidence(20, 0.4), score=lambda drafted: drafted.probability),
)


def by_name(found: Comparison) -> dict[str, PolicySummary]:
    return {each.name: each for each in summaries(found)}


@pytest.mark.examples(2)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.9}])
def test_all_policies_give_the_same_text_and_the_oracle_needs_the_fewest_passes(params: dict[str, float]) -> None:
    found = compared(CONTESTANTS, wrong=(4, 5, 11, 25), **params)
    assert found.changed == ()
    several = by_name(found)
    assert list(several) == [PLAIN, "static 5", "heuristic", "confidence", ORACLE]
    plain, oracle = several[PLAIN], several[ORACLE]
    assert (plain.target_passes, plain.draft_passes, plain.length) == (plain.tokens, 0, 0.0) == (2 * 4 * 39, 0, 0.0)
    assert oracle.wasted == 0 and oracle.shorter == oracle.longer == 0
    # Every token comes from one pass of either model.
    assert oracle.target_passes + oracle.draft_passes == oracle.tokens
    for each in several.values():
        assert each.target_passes + each.draft_passes - each.wasted == each.tokens == plain.tokens
        assert each.target_passes >= oracle.target_passes
        assert len(each.seconds) == 2
    # This draft model is sure of right tokens only, so confidence drafts one token too many, if any.
    assert several["confidence"].f1 == 1.0 == several["confidence"].auc
    assert several["static 5"].f1 < 1


def test_the_papers_example_adds_up() -> None:
    # DISCO, figure 3: the oracle makes 27 passes of the target and 129 of the draft model, static 5 makes 38 and 192.
    lengths = [0] * 27
    place = random.Random(3)
    for _ in range(129):
        # Unequal, as in the figure: most tokens are in a few long drafts.
        lengths[min(place.randrange(27), place.randrange(27))] += 1
    place.shuffle(lengths)
    ends, at = [], 1
    for length in lengths:
        at += length + 1
        ends.append(at - 1)
    assert at == 1 + 27 + 129
    found = compared([static(5)], wrong=ends, requests=REQUESTS[:1], max_tokens=at)
    several = by_name(found)
    # Two repeats.
    assert (several[ORACLE].target_passes, several[ORACLE].draft_passes) == (2 * 27, 2 * 129)
    assert several["static 5"].target_passes > 2 * 27 and several["static 5"].draft_passes > 2 * 129
    expected = [lengths.count(length) for length in range(max(lengths) + 1)]
    assert [count // 2 for count in several[ORACLE].histogram] == expected


class _OneLate(Oracle):
    @override
    def open(self, message: OpenSession) -> StopState:
        state = super().open(message)
        assert isinstance(state, OracleState)
        return _OneMore({at: length + 1 for at, length in state._lengths.items()})


class _OneMore(OracleState):
    pass


def test_a_policy_that_stops_one_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.stopping.run.Oracle", _OneLate)
    oracle = by_name(compared([], wrong=(4, 5, 11, 25)))[ORACLE]
    assert oracle.wasted > 0 and oracle.longer > 0.5
    assert oracle.target_passes + oracle.draft_passes > oracle.tokens


class _Obeys(ToyTarget):
    """A target whose choices follow the draft: what no target may do."""

    @override
    def finish(self) -> list[Outcome]:
        batch = self.under_way[0]
        found = super().finish()
        return [
            replace(outcome, choices=(rows.tokens[1], *outcome.choices[1:])) if rows.parents else outcome
            for rows, outcome in zip(batch, found, strict=True)
        ]


def test_a_changed_text_is_reported() -> None:
    found = compared([static(5)], wrong=(4, 5, 11, 25), target=_Obeys())
    assert "static 5" in found.changed and PLAIN not in found.changed
    assert not comparison_object(found, summaries(found))["lossless"]


def test_prompts_must_differ() -> None:
    with refuses(ConfigurationError, field="--prompts"):
        compared([], wrong=(), requests=(REQUESTS[0], replace(REQUESTS[1], prompt=REQUESTS[0].prompt)))


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with refuses(ConfigurationError, field="prompt 0"):
        compared([], wrong=(), max_tokens=600)


def step(drafted: int, accepted: int, *, cut: bool = False, scores: tuple[float, ...] = ()) -> ChainStep:
    return ChainStep(position=1, drafted=drafted, accepted=accepted, cut=cut, draft_s=0.01, target_s=0.1, scores=scores)


@pytest.mark.parametrize(
    ("steps", "f1"),
    [
        # Three times rightly on, rightly stopped at the wrong one.
        ([step(4, 3)], 1.0),
        # Stopped behind a right one: missed.
        ([step(4, 4)], 2 * 3 / (2 * 3 + 1)),
        # Went on behind the wrong one; the tokens behind it were never judged.
        ([step(5, 2)], 2 * 2 / (2 * 2 + 1)),
        # The end of the answer was not the policy's decision.
        ([step(4, 4, cut=True)], 1.0),
        # A draft of one token says of none that it will be accepted.
        ([step(1, 1), step(1, 0)], 0.0),
        # On behind a wrong one, and nothing right.
        ([step(2, 0)], 0.0),
        ([step(1, 0)], math.nan),
        ([step(0, 0)], math.nan),
    ],
)
def test_f1_is_of_judged_tokens(steps: list[ChainStep], f1: float) -> None:
    assert f1_of(steps) == pytest.approx(f1, nan_ok=True)


def test_the_area_is_the_share_of_ordered_pairs() -> None:
    # Judged: .9 and .5 accepted, .7 rejected; .99 behind the rejected one does not count.
    assert area_under_roc([step(4, 2, scores=(0.9, 0.5, 0.7, 0.99))]) == 0.5
    assert area_under_roc([step(2, 1, scores=(0.5, 0.5))]) == 0.5
    assert math.isnan(area_under_roc([step(2, 2, scores=(0.5, 0.5))]))


def test_tables_show_the_cost_ratio() -> None:
    several = summaries(compared(CONTESTANTS, wrong=(4, 5, 11, 25)))
    c = cost_of_a_draft(several)
    table = policy_table(several, "Policies")
    assert table.title == f"Policies (c = {c:.3f})" and c > 0
    assert [row[0] for row in table.rows] == [PLAIN, "static 5", "heuristic", "confidence", ORACLE]
    assert all(len(row) == len(table.columns) for row in table.rows)
    lengths = length_table(several)
    assert all(len(row) == len(lengths.columns) for row in lengths.rows)
    assert [row[0] for row in lengths.rows] == [row[0] for row in table.rows[1:]]
    # At c = 0 only passes of the target cost: tokens per pass.
    static_five = several[1]
    assert static_five.speed_by(0) == static_five.tokens / static_five.target_passes
    assert static_five.speed_by(1) < static_five.speed_by(0.1)
