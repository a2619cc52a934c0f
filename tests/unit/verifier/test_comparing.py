"""Replays of an answer under other strategies, beside a loop that decodes: on a simulated clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from typing_extensions import override

from services.api.messages import ClientRequest, RequestedSampling
from services.links.in_process import InProcessDraftLink
from services.router.comparisons import compared, plan_comparisons
from services.router.drafters import TrainedDrafter
from services.router.strategies import StrategyConfig
from services.verifier.comparing import comparing as comparing_module
from services.verifier.comparing.comparing import MOST_S, Comparing
from services.verifier.engine.native.library import engine_library
from speculation.budget import Budget, FixedBudget
from speculation.columns import SentReports
from speculation.errors import InvalidArgument, Unavailable
from speculation.messages import GenerationRequest, Progress, ReplayedAnswer
from speculation.types import Plan
from tests.engine.fakes import PLAIN, VOCAB, RandomDrafter, ToyTarget, collect, origin, request
from tests.engine.simulated import PASS_S, SimulatedBudget, SlowDrafter, decoding, simulated
from tests.running.refusals import refuses

PLAN = Plan(strategy="test", sources=("test",), max_nodes=6)
UNKNOWN = ReplayedAnswer(num_passes=None, seconds=None)
LENGTH = 60


def wanted(plan: Plan = PLAN) -> GenerationRequest:
    return request("r", [1, 2, 3], plan, max_tokens=LENGTH, ignore_eos=True)


async def replayed(
    drafter: RandomDrafter, *plans: Plan, budget: Budget | None = None
) -> tuple[int, tuple[ReplayedAnswer, ...]]:
    """The passes that an answer with drafts really takes, and what replays of it by ``plans`` find."""
    budget = budget or FixedBudget(max_nodes=6)
    comparing = Comparing([origin(InProcessDraftLink(drafter))], budget, VOCAB)
    async with decoding(ToyTarget(), *comparing.origins, budget=budget, draft_deadline_s=1.0) as loop:
        events = [event async for event in loop.generate(wanted()) if isinstance(event, Progress)]
        answer = tuple(token for event in events for token in event.token_ids)
        other = asyncio.create_task(collect(loop, wanted()))
        found = await comparing.compare(replace(wanted(PLAIN), committed=answer), plans)
        assert (await other)[0] == list(answer), "a comparison must not touch other answers"
    assert not drafter.sessions
    return len(events), found


@simulated
async def test_the_passes_are_those_of_the_real_answer() -> None:
    real, found = await replayed(RandomDrafter(mood="good"), PLAN, PLAIN)
    assert found == (ReplayedAnswer(num_passes=real, seconds=None), ReplayedAnswer(num_passes=LENGTH, seconds=None))
    assert real < LENGTH / 3


@simulated
async def test_seconds_are_by_the_table_of_costs() -> None:
    real, found = await replayed(RandomDrafter(mood="good"), PLAN, PLAIN, budget=SimulatedBudget(PASS_S))
    assert [each.num_passes for each in found] == [real, LENGTH]
    assert [each.seconds for each in found] == [pytest.approx(PASS_S * (passes - 1)) for passes in (real, LENGTH)]


@pytest.mark.parametrize("mood", ["failing", "silent", "malformed"])
@simulated
async def test_a_drafter_that_does_not_draft_makes_a_strategy_unknown(mood: str) -> None:
    _, found = await replayed(RandomDrafter(mood=mood), PLAN, PLAIN)
    assert found == (UNKNOWN, ReplayedAnswer(num_passes=LENGTH, seconds=None))


class CountingLink(InProcessDraftLink):
    """Notes how many reports came together at most."""

    together = 0

    @override
    def steps(self, reports: SentReports) -> None:
        self.together = max(self.together, len(reports))
        super().steps(reports)


@pytest.mark.skipif(engine_library() is None, reason="there is no compiler")
@simulated
async def test_reports_that_go_together_go_so_where_answers_may_be_compared() -> None:
    link = CountingLink(RandomDrafter(mood="good"))
    comparing = Comparing([origin(link)], FixedBudget(max_nodes=6), VOCAB)
    async with decoding(ToyTarget(), *comparing.origins, draft_deadline_s=1.0) as loop:
        await asyncio.gather(*(collect(loop, replace(wanted(), request_id=f"r{at}")) for at in range(4)))
    assert link.together > 1


@simulated
async def test_no_drafter_no_comparison() -> None:
    comparing = Comparing([], FixedBudget(max_nodes=6), VOCAB)
    assert await comparing.compare(replace(wanted(), committed=(1, 2)), [PLAN]) == (UNKNOWN,)


@simulated
async def test_time_is_bounded_for_those_who_wait_too() -> None:
    clock, drafter = asyncio.get_running_loop().time, SlowDrafter(lambda: 1.0)
    comparing = Comparing([origin(InProcessDraftLink(drafter))], FixedBudget(max_nodes=6), VOCAB)
    async with decoding(ToyTarget(), *comparing.origins) as loop:
        answer, *_ = await collect(loop, wanted(PLAIN))
        asked, began = replace(wanted(PLAIN), committed=tuple(answer)), clock()
        both = await asyncio.gather(*(comparing.compare(asked, [PLAIN, PLAN, PLAIN]) for _ in range(2)))
        # The first one leaves no time to the second.
        assert both[0] == (ReplayedAnswer(num_passes=LENGTH, seconds=None), UNKNOWN, UNKNOWN)
        assert both[1] == (UNKNOWN, UNKNOWN, UNKNOWN)
        assert clock() - began == pytest.approx(MOST_S, abs=0.1)
    assert not drafter.sessions


@simulated
async def test_nobody_waits_for_the_passes_of_a_long_answer_to_be_added_up() -> None:
    comparing, turns = Comparing([], SimulatedBudget(PASS_S), VOCAB), 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    count = 50 * comparing_module._AT_ONCE
    (found,) = await comparing.compare(replace(wanted(), committed=(1,) * count), [PLAIN])
    beside.cancel()
    assert found.num_passes == count and found.seconds == pytest.approx(PASS_S * (count - 1))
    assert turns > 40


class Absent:
    async def compare(self, message: GenerationRequest, plans: list[Plan]) -> tuple[ReplayedAnswer, ...]:
        raise Unavailable("gone")


async def test_an_answer_is_as_good_without_its_comparisons() -> None:
    planned = plan_comparisons(asking("suffix"), StrategyConfig())
    (told,) = await compared(Absent(), wanted(), [1, 2], planned)  # type: ignore[arg-type]
    assert (told.strategy, told.num_passes, told.tokens_per_pass, told.seconds) == ("suffix", None, None, None)


def asking(*names: str, prediction: str = "") -> ClientRequest:
    return ClientRequest(input="x", sampling=RequestedSampling(), compare=names, prediction=prediction)


def test_what_can_be_replayed() -> None:
    trained = StrategyConfig(
        trained=(TrainedDrafter(name="draft_model", source="draft_model"), TrainedDrafter(name="fspad", source="fspad")),
        retrieval=True,
        semantic=True,
    )
    blend, rest, plain = plan_comparisons(asking("blend", "rest", "autoregressive"), trained)
    assert (blend.plan.sources, blend.without) == (
        ("suffix", "recycling", "retrieval"),
        ("semantic", "fspad", "draft_model"),
    )
    assert (rest.plan.sources, rest.without) == (("retrieval",), ())
    assert [each.exact for each in (blend, rest, plain)] == [False, True, True]
    (predicted,) = plan_comparisons(asking("auto", prediction="y"), StrategyConfig())
    assert predicted.plan.sources[0] == "prediction"
    # Others draft nothing from it, and are compared without.
    assert plan_comparisons(asking("suffix", prediction="y"), StrategyConfig())[0].plan.sources == ("suffix",)
    for name in ("draft_model", "fspad", "semantic"):
        allowed = (
            "one of anpd, auto, autoregressive, blend, lookahead, prompt_lookup, recycling, rest, spectra, spectra_core, "
            "spectra_retrieval, suffix: models that draft are not run again, nor are hidden states kept"
        )
        with refuses(InvalidArgument, field="speculation.compare", value=name, allowed=allowed):
            plan_comparisons(asking(name), trained)
