"""What the router learns: contexts, costs and their errors, which strategy is chosen, and when answers are replayed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.metrics.prometheus_sink import PrometheusSink, written
from services.router.learning import learning as learning_module
from services.router.learning.choice import MOST_OPEN, why_left
from services.router.learning.compared_cost import ComparedCost, Estimate
from services.router.learning.config import USUAL, LearningConfig
from services.router.learning.contexts import Context, context_of, share_repeated
from services.router.learning.counts import Counts
from services.router.learning.learning import Learning, check_learning, costs_of
from services.router.strategies import StrategyConfig
from speculation.errors import ConfigurationError, Unavailable
from speculation.messages import GenerationRequest, ReplayedAnswer, VerifierCard
from speculation.sources import AUTO
from speculation.types import Plan, SamplingParams, SpeculationStats
from tests.running.refusals import refuses
from tests.unit.router.test_rules import FACTS, REQUEST

STRATEGY, ON = StrategyConfig(), LearningConfig(on=True)
NEW, COPIED = tuple(range(1000)), tuple(range(100)) * 10
# Tokens of every answer, and seconds of a plain step.
TOKENS, STEP_S = 101, 0.01


@dataclass
class Replaying:
    """A verifier that says of an answer what ``costs`` has for it: seconds, by strategy, as a share of plain decoding."""

    costs: Mapping[str, float] = field(default_factory=dict)
    waiting: int = 0
    error: Exception | None = None
    asked: list[GenerationRequest] = field(default_factory=list)

    async def describe(self) -> VerifierCard:
        return VerifierCard(
            model="m", max_model_len=9, vocab_size=9, running=0, waiting=self.waiting, free_blocks=0, total_blocks=0,
            bit_exact=True,
        )  # fmt: skip

    async def compare(self, request: GenerationRequest, plans: Sequence[Plan]) -> tuple[ReplayedAnswer, ...]:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        shares = (1.0 if plan.strategy == "autoregressive" else self.costs.get(plan.strategy) for plan in plans)
        return tuple(
            ReplayedAnswer(
                num_passes=None if share is None else round(share * TOKENS),
                seconds=None if share is None else share * STEP_S * (TOKENS - 1),
            )
            for share in shares
        )


def learner(verifier: Replaying, **settings: Any) -> Learning:
    return Learning(LearningConfig(on=True, **settings), STRATEGY, verifier)  # type: ignore[arg-type]


def sent(name: str = "r") -> GenerationRequest:
    sampling = SamplingParams(max_tokens=TOKENS, seed=1)
    return GenerationRequest(request_id=name, prompt=NEW, sampling=sampling, plan=Plan(strategy=AUTO))


async def answer(
    learning: Learning, prompt: Sequence[int] = NEW, *, seconds: float = 1000.0, passes: int = TOKENS, **facts: Any
) -> str:
    """Ask once, and have the answer replayed; the strategy that it had."""
    chosen = learning.choose(REQUEST, replace(FACTS, **facts), prompt)
    assert chosen is not None and chosen.plan.strategy == chosen.choice.strategy and chosen.plan.effort == "measured"
    learning.answered(chosen, sent(), range(TOKENS), SpeculationStats(num_spec_steps=passes), seconds)
    await learning.spare.settle()
    return chosen.choice.strategy


# --- contexts ------------------------------------------------------------------------------------------------------------


def test_contexts_tell_prompts_apart() -> None:
    kinds = {
        context_of(NEW, FACTS).kind,
        context_of(COPIED, FACTS).kind,
        context_of(NEW[:50], FACTS).kind,
        context_of(NEW, replace(FACTS, sampled=True)).kind,
        context_of(NEW, replace(FACTS, tools=True)).kind,
    }
    assert len(kinds) == 5 and context_of(NEW, FACTS) == Context("acme", "512.0.greedy")
    assert context_of(NEW, replace(FACTS, tenant="")).tenant == ""
    assert [share_repeated(tuple(range(length))) for length in (0, 1, 3, 4, 9000)] == [0.0] * 5
    assert share_repeated((7,) * 103) == 0.99
    # Only the end of a very long prompt is looked at.
    assert share_repeated((7,) * 100_000 + tuple(range(10_000))) == 0.0


# --- costs ---------------------------------------------------------------------------------------------------------------


def test_a_cost_is_shrunk_and_its_error_falls_with_answers() -> None:
    noise, cost, errors = random.Random(5), ComparedCost(), []
    for _ in range(300):
        cost.learn(100 * 0.8 * noise.lognormvariate(0, 0.2), 100.0)
        errors.append(cost.estimate(Estimate(1.0, 0.1)).error)
    found = cost.estimate(Estimate(1.0, 0.1))
    assert abs(found.cost - 0.8 * 1.02) < 3 * found.error and found.error < 0.02
    assert errors[0] > errors[20] > errors[100]
    # It remembers 20,000 plain steps, and what is new counts soon.
    assert cost.whole == pytest.approx(20_000, rel=1e-3)
    for _ in range(300):
        cost.learn(120.0, 100.0)
    assert cost.estimate(Estimate(1.0, 0.1)).cost > 1.1


def test_costs_of_two_routers_are_those_of_one() -> None:
    one, two, both = ComparedCost(), ComparedCost(), ComparedCost()
    for number in range(20):
        for cost in ((one, two)[number % 2], both):
            cost.learn(50.0 + number, 100.0)
    one.add_cost(two)
    assert one.numbers == pytest.approx(both.numbers)


def test_a_new_tenant_begins_with_what_others_have_shown() -> None:
    counts = Counts()
    for _ in range(60):
        counts.learn(Context("acme", "copies"), {"suffix": (70.0, 100.0)})
    new, other_kind = (counts.estimate(Context("new", kind), "suffix") for kind in ("copies", "tales"))
    own = counts.estimate(Context("acme", "copies"), "suffix")
    assert own.cost <= new.cost < 0.75 and own.error < new.error < other_kind.error
    assert counts.estimate(Context("new", "copies"), "recycling").cost == 1.0


def test_tenants_are_bounded_and_forgotten() -> None:
    counts = Counts(most_tenants=3)
    for tenant in ("a", "b", "a", "c", "d"):
        counts.learn(Context(tenant, "k"), {"suffix": (50.0, 100.0)})
    assert list(counts._tenants) == ["a", "c", "d"]
    counts.forget("c")
    assert list(counts._tenants) == ["a", "d"]


def test_a_replay_of_auto_counts_as_its_passes_were() -> None:
    def replayed(share: float) -> ReplayedAnswer:
        return ReplayedAnswer(num_passes=round(share * TOKENS), seconds=share * STEP_S * (TOKENS - 1))

    found = {AUTO: replayed(0.8), "autoregressive": replayed(1.0), "suffix": replayed(0.7)}
    # It took half the passes of its replay: its sources knew more than a replay tells them.
    costs = costs_of(found, TOKENS, round(0.4 * TOKENS), usual=1.0)
    assert costs["suffix"] == pytest.approx((70.0, 40.0), rel=0.02) and costs[AUTO] == pytest.approx((40.0, 81.0))
    # With another strategy, what such answers showed before stands for that.
    other = costs_of(found, TOKENS, None, usual=0.5)
    assert other.keys() == {"suffix", "autoregressive"} and other["suffix"] == pytest.approx((70.0, 40.0))
    # More passes were the load's doing.
    assert costs_of(found, TOKENS, TOKENS, usual=1.0)["suffix"] == pytest.approx((70.0, 80.0))
    unknown = ReplayedAnswer(num_passes=3, seconds=None)
    for name in (AUTO, "autoregressive"):
        assert costs_of({**found, name: unknown}, TOKENS, 50, usual=1.0) == {}
    assert "suffix" not in costs_of({**found, "suffix": unknown}, TOKENS, 50, usual=1.0)


# --- a day ---------------------------------------------------------------------------------------------------------------

# Of each kind of prompt, seconds as a share of plain decoding's. No strategy is good for both.
KINDS: dict[str, dict[str, float]] = {
    "copies": {AUTO: 0.6, "autoregressive": 1.0, "prompt_lookup": 0.5, "suffix": 0.42, "recycling": 0.9},
    "tales": {AUTO: 0.9, "autoregressive": 1.0, "prompt_lookup": 1.05, "suffix": 1.05, "recycling": 0.78},
}
# One tenant's copies are others than everybody's.
ODD = {"copies": {**KINDS["copies"], "prompt_lookup": 0.38, "suffix": 0.6}, "tales": KINDS["tales"]}
# By tenant: the share of its prompts that are copies.
TENANTS = {"editor": 1.0, "novel": 0.0, "mixed": 0.5, "odd": 0.9, "small": 0.2}


async def day(learning: Learning, verifier: Replaying, answers: int) -> tuple[float, dict[str, float]]:
    """How much longer a day's answers took than with the best strategy for each tenant and kind: in all, and by tenant."""
    source = random.Random(11)
    took = {(tenant, kind): dict.fromkeys(("chosen", *KINDS["tales"]), 0.0) for tenant in TENANTS for kind in KINDS}
    for number in range(answers):
        tenant = "small" if number % 20 == 0 else source.choice(list(TENANTS)[:-1])
        kind = "copies" if source.random() < TENANTS[tenant] else "tales"
        means = (ODD if tenant == "odd" else KINDS)[kind]
        # An answer suits drafting or does not, and each way of it more or less.
        suits = source.lognormvariate(0, 0.15)
        costs = {name: share * suits * source.lognormvariate(0, 0.12) for name, share in means.items()}
        verifier.costs = costs
        prompt = COPIED if kind == "copies" else NEW
        # Every fourth answer's time pays for a replay.
        strategy = await answer(learning, prompt, tenant=tenant, seconds=1000.0 if number % 4 == 0 else 0.0)
        if number % 4:
            learning.spare._account_s = 0.0
        for name, share in (("chosen", costs[strategy]), *costs.items()):
            took[tenant, kind][name] += share

    def over_best(*tenants: str) -> float:
        own = [seconds for (tenant, _), seconds in took.items() if tenant in tenants]
        best = sum(min(each for name, each in seconds.items() if name != "chosen") for seconds in own)
        return sum(seconds["chosen"] for seconds in own) / best - 1

    return over_best(*TENANTS), {tenant: over_best(tenant) for tenant in TENANTS}


async def test_regret_of_a_day_is_small_for_everybody() -> None:
    verifier = Replaying()
    mean, by_tenant = await day(learner(verifier), verifier, 1200)
    assert mean <= 0.03 and max(by_tenant.values()) <= 0.08, (mean, by_tenant)


async def test_who_ignores_the_context_fails_that_day(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Replaying()
    monkeypatch.setattr(learning_module, "context_of", lambda prompt, facts: Context("", "any prompt"))
    mean, by_tenant = await day(learner(verifier), verifier, 1200)
    assert max(by_tenant.values()) > 0.08, (mean, by_tenant)


async def test_where_auto_is_best_it_stays() -> None:
    verifier = Replaying()
    learning, source = learner(verifier), random.Random(2)
    left = 0
    for _ in range(400):
        verifier.costs = {name: 0.8 * source.lognormvariate(0, 0.2) for name in (AUTO, *USUAL)}
        left += await answer(learning) != AUTO
    # No strategy is 3 % faster; what seems so for a while is chance, and costs nothing.
    assert left <= 40


# --- whom it chooses for, and when it learns -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "facts", "why"),
    [
        ({"strategy": "suffix"}, {}, "say how"),
        ({"sources": ("suffix", "recycling")}, {}, "say how"),
        ({"num_speculative_tokens": 4}, {}, "say how"),
        ({"effort": "paper"}, {}, "say how"),
        ({"drafter": "mine"}, {}, "say how"),
        ({"acceptance": "rejection"}, {}, "depend on what is drafted"),
        ({"private": True}, {}, "private"),
        ({"prediction": "the text"}, {}, "prediction"),
        ({"group": "ours"}, {}, "group"),
        ({}, {"grammar": True}, "form"),
        ({}, {}, ""),
    ],
)
def test_who_is_left_alone(request_: dict[str, Any], facts: dict[str, Any], why: str) -> None:
    asked, seen = replace(REQUEST, **request_), replace(FACTS, **facts)
    found = why_left(asked, seen, STRATEGY)
    assert why in found and bool(why) == bool(found)
    assert (learner(Replaying()).choose(asked, seen, NEW) is None) == bool(why)


async def test_a_choice_says_why_and_is_counted() -> None:
    sink, verifier = PrometheusSink(), Replaying({AUTO: 0.9, "suffix": 0.5})
    learning = Learning(ON, STRATEGY, verifier, sink)  # type: ignore[arg-type]
    chosen = [await answer(learning, passes=round(0.9 * TOKENS)) for _ in range(12)]
    assert chosen[0] == AUTO and chosen[-1] == "suffix"
    last = learning.choose(REQUEST, FACTS, NEW)
    assert last is not None and last.choice.why.startswith("4") and last.plan.sources == ("suffix",)
    # In a full house nothing is known.
    crowd = learning.choose(REQUEST, replace(FACTS, open_requests=MOST_OPEN + 1), NEW)
    assert crowd is not None and crowd.choice.strategy == AUTO and "open" in crowd.choice.why
    shown = written(sink.collect()).decode()
    assert 'outrider_router_learning_replays_total{outcome="learnt"} 12.0' in shown
    assert f'outrider_router_learning_choices_total{{strategy="suffix"}} {chosen.count("suffix") + 1}.0' in shown


async def test_replays_take_a_share_of_the_time_and_wait_for_nobody() -> None:
    now = [0.0]
    verifier = Replaying({AUTO: 0.9, "suffix": 0.5})
    learning = learner(verifier)
    learning.spare._clock = lambda: now[0]
    compare = verifier.compare

    async def slow(*arguments: Any) -> Any:
        now[0] += 0.5
        return await compare(*arguments)

    verifier.compare = slow  # type: ignore[method-assign]
    for _ in range(1000):
        await answer(learning, seconds=2.0)
    # 2,000 seconds of answers pay for 20, which are 40 replays.
    assert 39 <= len(verifier.asked) <= 42 and learning.spare.spent_s == 0.5 * len(verifier.asked)
    verifier.waiting, before = 1, len(verifier.asked)
    for _ in range(100):
        await answer(learning, seconds=2.0)
    assert len(verifier.asked) == before


async def test_one_answer_is_replayed_at_a_time_and_short_ones_never() -> None:
    verifier = Replaying({AUTO: 0.9})
    learning = learner(verifier)
    chosen = learning.choose(REQUEST, FACTS, NEW)
    assert chosen is not None
    learning.answered(chosen, sent("short"), range(7), SpeculationStats(), 1000.0)
    for name in ("one", "two"):
        learning.answered(chosen, sent(name), range(TOKENS), SpeculationStats(num_spec_steps=9), 1000.0)
    await learning.spare.settle()
    assert [each.request_id for each in verifier.asked] == ["one"] and len(verifier.asked[0].committed) == TOKENS
    await learning.stop()


@pytest.mark.parametrize("error", [Unavailable("no drafter"), ValueError("a fault")])
async def test_a_replay_that_fails_teaches_nothing(error: Exception) -> None:
    verifier = Replaying({AUTO: 0.9, "suffix": 0.1}, error=error)
    learning = learner(verifier)
    assert {await answer(learning) for _ in range(20)} == {AUTO} and not learning.counts.everybody
    verifier.error = None
    assert "suffix" in {await answer(learning) for _ in range(20)}


async def test_a_forgotten_tenants_replay_teaches_nothing() -> None:
    verifier = Replaying({AUTO: 0.9, "suffix": 0.5})
    learning = learner(verifier)
    await answer(learning)
    assert "acme" in learning.counts._tenants
    chosen = learning.choose(REQUEST, FACTS, NEW)
    assert chosen is not None
    learning.answered(chosen, sent(), range(TOKENS), SpeculationStats(num_spec_steps=9), 1000.0)
    await learning.forget("acme")
    await learning.spare.settle()
    assert "acme" not in learning.counts._tenants and len(verifier.asked) == 2


def test_several_routers_without_redis_tell_no_tenants_apart() -> None:
    learning = learner(Replaying(), alone=False)
    chosen = learning.choose(REQUEST, FACTS, NEW)
    assert chosen is not None and chosen.context.tenant == ""


@pytest.mark.parametrize(
    ("config", "strategy", "named"),
    [
        (ON, StrategyConfig(strategy="suffix"), "router.learning"),
        (ON, StrategyConfig(acceptance="rejection"), "router.learning"),
        (ON, StrategyConfig(effort="paper"), "router.learning"),
        (LearningConfig(on=True, redis_password="words"), STRATEGY, "router.learning_redis_password"),
        (LearningConfig(on=True, strategies=("magic",)), STRATEGY, "router.learning_strategies"),
        (LearningConfig(on=True, strategies=("rest",)), STRATEGY, "router.learning_strategies"),
        (LearningConfig(on=True, strategies=("eagle",)), STRATEGY, "router.learning_strategies"),
    ],
)
def test_settings_that_leave_nothing_to_choose_are_refused(
    config: LearningConfig, strategy: StrategyConfig, named: str
) -> None:
    with refuses(ConfigurationError, field=named):
        check_learning(config, strategy)
