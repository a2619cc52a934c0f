"""How long a step waits for drafts: what pays, what the account allows, and what it comes to with drafters of any delay."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable

import pytest

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.waiting import Experience, Missing, Waiting, Worth, best_wait
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.stats import LoopStats
from tests.engine.fakes import PLAIN, ToyTarget, collect, origin, request
from tests.engine.simulated import SimulatedBudget, SimulatedWorker, SlowDrafter, run

PASS_S, DEADLINE_S = 0.01, 0.025


def missing(*left: float, tokens: float = 2.0, seconds: float = 0.0) -> Missing:
    return Missing(left=sorted(left), tokens=tokens, seconds=seconds)


def test_a_draft_is_waited_for_as_long_as_it_pays() -> None:
    # Alone, two more tokens pay for two passes' time, not for more.
    assert best_wait([missing(0.019)], 1.0, PASS_S, 1.0) == 0.019
    assert best_wait([missing(0.021)], 1.0, PASS_S, 1.0) == 0.0
    # Beside nine others, who give a token each, for a tenth of that.
    assert best_wait([missing(0.0019)], 10.0, PASS_S, 1.0) == 0.0019
    assert best_wait([missing(0.0021)], 10.0, PASS_S, 1.0) == 0.0
    # Its rows cost time, too.
    assert best_wait([missing(0.019, seconds=0.002)], 1.0, PASS_S, 1.0) == 0.0


def test_what_rarely_comes_in_time_is_worth_its_chance() -> None:
    rarely = missing(0.004, *[math.inf] * 9)
    assert best_wait([rarely], 1.0, PASS_S, 1.0) == 0.0
    assert best_wait([missing(0.0015, *[math.inf] * 9)], 1.0, PASS_S, 1.0) == 0.0015
    often = missing(0.004, 0.004, 0.004, math.inf)
    assert best_wait([often], 1.0, PASS_S, 1.0) == 0.004
    assert best_wait([missing()], 1.0, PASS_S, 1.0) == 0.0
    assert best_wait([missing(0.5)], 1.0, PASS_S, 0.4) == 0.0


def test_the_fast_one_is_taken_and_the_slow_one_left() -> None:
    fast, slow = missing(0.001, tokens=3.0), missing(0.03, tokens=0.5)
    assert best_wait([fast, slow], 1.0, PASS_S, 1.0) == 0.001
    # Where time does not count, all are waited for.
    assert best_wait([fast, slow], 1.0, math.inf, 1.0) == 0.03


def test_the_best_deadline_is_found_among_all() -> None:
    numbers = random.Random(3)
    for _ in range(200):
        each = [
            missing(*(numbers.uniform(0, 0.03) for _ in range(4)), tokens=numbers.uniform(0, 4))
            for _ in range(numbers.randint(1, 3))
        ]
        found = best_wait(each, 2.0, PASS_S, 0.025)

        def rate(deadline: float, each: list[Missing] = each) -> float:
            tokens, waited = 2.0, 0.0
            steps = 400
            for step in range(steps):
                at = deadline * step / steps
                waited += deadline / steps * (1 - math.prod(sum(x <= at for x in one.left) / 4 for one in each))
            tokens += sum(one.tokens * sum(x <= deadline for x in one.left) / 4 for one in each)
            return tokens / (PASS_S + waited)

        best = max([0.0, *(x for one in each for x in one.left if x <= 0.025)], key=rate)
        assert rate(found) == pytest.approx(rate(best), rel=0.02)


def test_what_is_expected_is_what_came_before() -> None:
    known = Experience(0.02)
    assert known.left(0.005) == [pytest.approx(0.015, abs=1e-3)]
    for took in (0.001, 0.003, 0.002):
        known.came(took)
    assert known.left(0.0015) == pytest.approx([0.0005, 0.0015], abs=1e-3)
    assert known.left(0.1) == []
    for _ in range(4):
        known.wasted()
    assert known.left(0.0) == [], "silent"
    known.spoke()
    assert known.left(0.0)[:3] == pytest.approx([0.001, 0.002, 0.003], abs=1e-3)
    assert known.left(0.0)[3:] == [math.inf] * 4


def test_worth_follows_what_drafts_bring() -> None:
    worth = Worth()
    other = worth.copy()
    for _ in range(100):
        worth.learn(5, late=False)
        worth.learn(2, late=True)
    assert (worth.of(late=False), worth.of(late=True)) == (pytest.approx(5, abs=0.1), pytest.approx(2, abs=0.1))
    assert other == Worth()


def test_estimates_that_are_wrong_cost_little() -> None:
    """Every draft seems to come at once and to be worth much, and none comes."""
    for others in (False, True):
        waiting, waited = Waiting(DEADLINE_S), 0.0
        for _ in range(2000):
            found = waiting.seconds([missing(0.001, tokens=9.0)], 1.0, PASS_S, delays_others=others)
            waiting.waited(found, wasted=True)
            waited += found
        assert 0 < waited < 0.02 * 2000 * PASS_S


def test_a_trial_once_in_a_while_and_less_often_if_wasted() -> None:
    waiting = Waiting(DEADLINE_S)
    at = []
    for step in range(5000):
        if found := waiting.seconds([missing()], 1.0, PASS_S, delays_others=False):
            waiting.waited(found, wasted=True)
            at.append(step)
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert 4 <= len(at) < 20
    assert gaps == sorted(gaps)


async def measure(
    drafter: SlowDrafter | None, *, plain: int, speculating: int, pass_s: float, tokens: int
) -> tuple[float, float, LoopStats]:
    """Simulated seconds until all plain requests have ended, and until all others have."""
    target, clock = ToyTarget(), asyncio.get_running_loop()
    origins = [] if drafter is None else [origin(InProcessDraftLink(drafter))]
    loop = DecodingLoop(
        target,
        origins,
        SimulatedBudget(pass_s),
        LoopConfig(draft_deadline_s=DEADLINE_S),
        SimulatedWorker(lambda: pass_s),
    )
    await loop.start()

    async def ended(name: str, number: int) -> float:
        plan = PLAIN if name == "plain" else None
        wanted = request(f"{name}{number}", [1, 2, number], plan, max_tokens=tokens, ignore_eos=True)
        answer, _, _ = await collect(loop, wanted)
        assert len(answer) == tokens
        return clock.time()

    async def last(name: str, count: int) -> float:
        return max(await asyncio.gather(*(ended(name, number) for number in range(count))), default=0.0)

    ends = await asyncio.gather(last("plain", plain), last("speculating", speculating))
    await loop.stop()
    return ends[0], ends[1], loop.stats


DELAYS_S = [0.0, 0.0004, 0.002, 0.005, 0.009, 0.012, 0.02, 0.028, 0.1, 1.0]


def random_delays() -> Callable[[], float]:
    numbers = random.Random(1)
    return lambda: numbers.choice([0.0005, 0.003, 0.02, 0.2])


@pytest.mark.examples(13)
@pytest.mark.parametrize("plain", [0, 2], ids=["alone", "beside plain requests"])
@pytest.mark.parametrize("mood", ["good", "random"])
@pytest.mark.parametrize("delay", [*DELAYS_S, "any"], ids=lambda delay: f"{delay}s")
def test_no_drafter_costs_anybody_time(delay: float | str, mood: str, plain: int) -> None:
    tokens = 300
    delays = random_delays() if isinstance(delay, str) else lambda: delay
    drafter = SlowDrafter(delays, mood)
    found = run(measure(drafter, plain=plain, speculating=1, pass_s=PASS_S, tokens=tokens))
    without = tokens * PASS_S
    assert found[0] <= 1.03 * without
    assert found[1] <= 1.03 * without


@pytest.mark.parametrize("speculating", [1, 4])
def test_a_fast_drafter_is_waited_for(speculating: int) -> None:
    drafter = SlowDrafter(lambda: 0.0005)
    _, took, stats = run(measure(drafter, plain=0, speculating=speculating, pass_s=PASS_S, tokens=280))
    # Seven tokens a pass, at best.
    assert took < 280 / 7 * PASS_S * 1.4
    assert stats.drafts_missed == 0


def test_a_slow_drafter_that_brings_much_is_waited_for() -> None:
    """Six tokens for the time of two passes more."""
    _, took, _ = run(measure(SlowDrafter(lambda: 0.02), plain=0, speculating=1, pass_s=PASS_S, tokens=280))
    assert took < 0.6 * 280 * PASS_S


def test_a_drafter_that_becomes_faster_is_noticed() -> None:
    delay = 1.0

    async def main() -> tuple[float, float]:
        nonlocal delay
        target, clock = ToyTarget(), asyncio.get_running_loop()
        drafter = SlowDrafter(lambda: delay)
        config = LoopConfig(draft_deadline_s=DEADLINE_S)
        worker = SimulatedWorker(lambda: PASS_S)
        loop = DecodingLoop(target, [origin(InProcessDraftLink(drafter))], SimulatedBudget(PASS_S), config, worker)
        await loop.start()
        took = []
        for name in ("slow", "between", "fast"):
            began = clock.time()
            await collect(loop, request(name, [1, 2], max_tokens=300, ignore_eos=True))
            took.append(clock.time() - began)
            delay = 0.0005
        await loop.stop()
        return took[0], took[2]

    slow, fast = run(main())
    assert fast < 0.25 * slow
