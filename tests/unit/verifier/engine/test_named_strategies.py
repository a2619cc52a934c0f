"""Requests by their paper's rule are drafted for at every step, whatever that costs; others pay a bounded share for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from typing_extensions import override

from services.api.messages import ClientRequest, RequestedSampling
from services.links.in_process import InProcessDraftLink
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.named_share import NamedShare
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.stats import LoopStats
from services.verifier.model.target_port import Rows
from speculation.budget import Budget, FixedBudget, MeasuredBudget
from speculation.columns import SentReports
from speculation.costs import CostTable
from speculation.messages import Draft, DraftFailure, StepReport
from speculation.types import EMPTY_TREE, Plan
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, origin, request
from tests.engine.simulated import SimulatedWorker, SlowDrafter, run

# A pass over one row, and what each further row adds: so dear that no random draft pays.
PASS_S, ROW_S = 0.010, 0.004
TOKENS = 200
MEASURED = Plan(strategy="test", sources=("test",), max_nodes=6)
PAPER = replace(MEASURED, effort="paper")
# Time does not count.
FIXED = FixedBudget(max_nodes=6)


class Counting(ToyTarget):
    """Knows how long its next pass takes."""

    seconds = PASS_S

    @override
    def begin(self, batch: Sequence[Rows]) -> None:
        self.seconds = PASS_S + ROW_S * (sum(len(rows.tokens) for rows in batch if rows.context > 3) - 1)
        super().begin(batch)


class TextAndModel(RandomDrafter):
    """Says at once that its texts have found nothing, and sends its model's draft some passes later."""

    @override
    async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:
        found = await super()._draft(session_id, max_nodes)
        return replace(found, tree=EMPTY_TREE, group="text", more=max_nodes > 0) if isinstance(found, Draft) else found

    @override
    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        await asyncio.sleep(5 * PASS_S)
        found = await super()._draft(session_id, 6)
        if isinstance(found, Draft):
            yield replace(found, group="draft_model")


@dataclass
class Run:
    took: dict[str, float]
    stats: LoopStats
    notes: dict[str, list[str]]


async def answered(
    plans: dict[str, Plan],
    *,
    draft_s: float = 0.0,
    drafter: RandomDrafter | None = None,
    link: InProcessDraftLink | None = None,
    tokens: int = TOKENS,
    budget: Budget | None = None,
    **limits: float,
) -> Run:
    """Answers of so many tokens at once, one for each plan; without a ``drafter``, drafts are wrong and take ``draft_s``."""
    target, clock = Counting(), asyncio.get_running_loop()
    budget = budget or MeasuredBudget(
        CostTable(by_rows={1: PASS_S, 64: PASS_S + 63 * ROW_S}, per_request=0.0, per_key=0.0), max_nodes=6
    )
    config = LoopConfig(draft_deadline_s=0.025, **limits)  # type: ignore[arg-type]
    loop = DecodingLoop(
        target,
        [origin(link or InProcessDraftLink(drafter or SlowDrafter(lambda: draft_s, "random")))],
        budget,
        config,
        SimulatedWorker(lambda: target.seconds),
    )
    await loop.start()
    notes: dict[str, list[str]] = {}

    async def ended(name: str, plan: Plan) -> tuple[str, float]:
        answer, _, steps = await collect(loop, request(name, [1, 2, 3], plan, max_tokens=tokens, ignore_eos=True))
        assert len(answer) == tokens
        notes[name] = [note for step in steps for note in step.switches]
        return name, clock.time()

    took = dict(await asyncio.gather(*(ended(name, plan) for name, plan in plans.items())))
    await loop.stop()
    return Run(took, loop.stats, notes)


def nodes(found: Run) -> int:
    return sum(found.stats.nodes_by_source.values())


@pytest.mark.parametrize("draft_s", [0.0005, 0.1])
def test_each_step_has_its_draft_alone(draft_s: float) -> None:
    """It brings nothing, and it is slow: who measures leaves it out, who names it has it at every step."""
    paper = run(answered({"a": PAPER}, draft_s=draft_s))
    assert paper.stats.drafts_missed == 0
    assert paper.stats.drafts_used >= 0.8 * TOKENS
    assert nodes(paper) >= 2.5 * paper.stats.drafts_used
    measured = run(answered({"a": MEASURED}, draft_s=draft_s))
    assert nodes(measured) < 0.1 * nodes(paper)


@pytest.mark.parametrize("draft_s", [0.0005, 0.1])
def test_each_step_has_its_draft_where_time_does_not_count(draft_s: float) -> None:
    """A fixed budget checks what is there. Who names a strategy has it waited for as well."""
    paper = run(answered({"a": PAPER}, draft_s=draft_s, budget=FIXED))
    assert paper.stats.drafts_missed == 0
    assert paper.stats.drafts_used >= 0.8 * TOKENS
    assert nodes(paper) >= 2.5 * paper.stats.drafts_used


def test_the_first_step_of_an_answer_has_its_models_draft_too() -> None:
    """The text's draft, which is there at once, is not all that there will be."""
    plan = Plan(strategy="test", sources=("suffix", "draft_model"), max_nodes=12, effort="paper")
    stats = run(answered({"a": plan}, drafter=TextAndModel(mood="good"), tokens=8)).stats
    # One token from the prompt's pass, which waits for nobody; then six that were guessed, and the next.
    assert stats.by_strategy["test"].passes == 2 and stats.deadline_misses == 0


@pytest.mark.parametrize("budget", [None, FIXED])
def test_a_drafter_that_never_answers_is_waited_for_a_few_times_only(budget: Budget | None) -> None:
    found = run(answered({"a": PAPER}, draft_s=1e6, budget=budget, named_deadline_s=0.5))
    assert found.took["a"] < TOKENS * PASS_S + 10 * 0.5


@pytest.mark.examples(4)
@pytest.mark.parametrize("draft_s", [0.0005, 0.02, 0.1])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_others_pay_a_bounded_share(draft_s: float, share: float) -> None:
    """The first to end is the plain one, or both end together, since drafts bring nothing."""
    plain = run(answered({"plain": PLAIN, "other": PLAIN}, draft_s=draft_s))
    mixed = run(answered({"plain": PLAIN, "named": PAPER}, draft_s=draft_s, named_share=share))
    longer = mixed.took["plain"] / plain.took["plain"] - 1.0
    # A node now and then is checked for anybody, so that it is known whether drafts have become better.
    assert longer <= share + 0.02
    # What is allowed is used, if it can pay for a wait and the rows behind it.
    assert nodes(mixed) > 0 or draft_s > 0.01


@pytest.mark.examples(3)
@pytest.mark.parametrize("draft_s", [0.0005, 0.03, 0.1])
def test_others_pay_no_more_where_time_does_not_count(draft_s: float) -> None:
    """A fixed budget makes them wait for any draft that comes soon. A strategy that is named adds its share at most."""
    unnamed = run(answered({"plain": PLAIN, "other": MEASURED}, draft_s=draft_s, budget=FIXED))
    named = run(answered({"plain": PLAIN, "other": PAPER}, draft_s=draft_s, budget=FIXED))
    assert named.took["plain"] <= (1.0 + LoopConfig().named_share + 0.02) * unnamed.took["plain"]


class Unconnected(InProcessDraftLink):
    """A link to a drafter that has gone."""

    connected = False  # type: ignore[assignment]

    @override
    def step(self, message: StepReport) -> None:
        pass

    @override
    def steps(self, reports: SentReports) -> None:
        pass


WITHOUT = "without the draft of test: "


@pytest.mark.parametrize("budget", [None, FIXED])
@pytest.mark.parametrize(
    ("how", "why", "words"),
    [
        ({"draft_s": 0.3, "named_deadline_s": 0.2}, "deadline", "it did not come in time (verifier.named_deadline_s)"),
        ({"draft_s": 1e6, "named_deadline_s": 0.2}, "silent", "its drafter had not answered yet"),
        ({"drafter": RandomDrafter(mood="silent")}, "failed", "its drafter could not make one"),
        ({"link": Unconnected(RandomDrafter())}, "lost", "its drafter was not connected"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_answer_says_why_it_went_without_drafts(how: dict[str, Any], why: str, words: str, budget: Budget | None) -> None:
    found = run(answered({"a": PAPER}, budget=budget, **how))
    counts, notes = found.stats.named["test"], found.notes["a"]
    assert counts["answers"] == counts["answers without"] == 1 and counts[why] > 0
    assert any(note.endswith(f" tokens a step {WITHOUT}{words}") for note in notes)
    if counts[why] > 1:
        assert f"after {TOKENS} tokens {counts[why]} of {counts['steps']} steps {WITHOUT}{words}" in notes


def test_an_answer_says_that_others_would_have_lost_too_much() -> None:
    notes = run(answered({"plain": PLAIN, "named": PAPER}, draft_s=0.0005, named_share=0.0)).notes
    words = "what other requests may lose by it (verifier.named_share) was used up"
    assert notes["plain"] == []
    assert any(note.endswith(f"a step {WITHOUT}{words}") for note in notes["named"])


def test_an_answer_that_had_all_of_its_drafts_says_nothing() -> None:
    found = run(answered({"a": PAPER}, draft_s=0.0005))
    assert found.notes["a"] == []
    assert found.stats.named["test"] == {"answers": 1, "steps": found.stats.drafts_used, "answers without": 0}


def test_without_a_share_nothing_is_added() -> None:
    plain = run(answered({"plain": PLAIN, "other": PLAIN}, draft_s=0.0005))
    mixed = run(answered({"plain": PLAIN, "named": PAPER}, draft_s=0.0005, named_share=0.0))
    assert mixed.took["plain"] <= 1.02 * plain.took["plain"]


def test_named_requests_wait_for_what_passes_earn() -> None:
    share = NamedShare(0.1)
    assert share.left_s == 0.0
    for _ in range(10):
        share.passed(0.010)
    assert share.left_s == pytest.approx(0.010)
    share.spend(0.015)
    assert share.left_s == 0.0
    for _ in range(10_000):
        share.passed(1.0)
    assert share.left_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("strategy", "asked", "configured", "effort"),
    [
        ("auto", None, None, "measured"),
        ("blend", None, None, "measured"),
        ("autoregressive", None, None, "measured"),
        ("suffix", None, None, "paper"),
        ("lookahead", None, None, "paper"),
        ("lookahead", None, "measured", "measured"),
        ("lookahead", "paper", "measured", "paper"),
        ("auto", "paper", None, "paper"),
    ],
)
def test_who_names_a_strategy_has_it(strategy: str, asked: str | None, configured: str | None, effort: str) -> None:
    config = StrategyConfig(effort=configured)  # type: ignore[arg-type]
    plan = make_plan(ClientRequest(input="x", sampling=RequestedSampling(), strategy=strategy, effort=asked), config)  # type: ignore[arg-type]
    assert plan.effort == effort
    assert plan.by_paper == (effort == "paper")
