"""How often drafts are asked for: what drafting costs the passes, and what it comes to on a simulated clock."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.asking import MOST_STEPS, AskCost, Gain, Pace, Prices, opening_pays
from services.verifier.engine.loop import DecodingLoop
from speculation.columns import SentReports
from speculation.messages import Draft, DraftFailure, OpenSession, StepReport
from tests.engine.fakes import ToyTarget, collect, origin, request
from tests.engine.simulated import SimulatedBudget, SimulatedWorker, SlowDrafter, run

PASS_S = 0.01
PRICES = Prices(pass_s=PASS_S, row_s=0.0, requests=1)


def gain(average_s: float, like_last_s: float = -1.0, passes: int = 1) -> Gain:
    return Gain(average_s=average_s, like_last_s=like_last_s, passes=passes)


def known(slower: float, requests: int = 1) -> AskCost:
    """The cost, learnt from passes that each draft makes slower by a share ``slower`` of a pass without requests."""
    cost, numbers = AskCost(), random.Random(5)
    for _ in range(400):
        drafts = numbers.randint(0, requests)
        seconds = PASS_S * (1 + slower * drafts + numbers.gauss(0, 0.05))
        cost.learn(requests=requests, rows=requests, drafts=drafts, seconds=seconds + 0.002, expected_s=PASS_S)
    return cost


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("slower", [0.0, 0.08, 0.2])
def test_the_cost_of_a_draft_is_what_passes_take_longer(slower: float, requests: int) -> None:
    assert known(slower / requests, requests).seconds(PRICES) == pytest.approx(slower / requests * PASS_S, abs=0.03 * PASS_S)


def test_without_passes_that_differ_a_draft_is_taken_to_cost_something() -> None:
    cost = AskCost()
    for _ in range(100):
        cost.learn(requests=1, rows=1, drafts=1, seconds=0.02, expected_s=PASS_S)
    assert cost.seconds(PRICES) == pytest.approx(0.15 * PASS_S)
    assert cost.explores


def test_one_pass_that_was_interrupted_says_little() -> None:
    cost = known(0.0)
    cost.learn(requests=1, rows=1, drafts=1, seconds=1.0, expected_s=PASS_S)
    assert cost.seconds(PRICES) < 0.05 * PASS_S


def test_trees_that_cost_less_than_expected_make_drafting_no_cheaper() -> None:
    cost, numbers = known(0.2), random.Random(6)
    for _ in range(200):
        # Most drafts bring a tree, whose rows take less time than the table says.
        rows, drafts = (4, 1) if numbers.random() < 0.8 else (1, numbers.randint(0, 1))
        seconds = PASS_S * (1 + 0.2 * drafts + numbers.gauss(0, 0.05))
        cost.learn(requests=1, rows=rows, drafts=drafts, seconds=seconds, expected_s=PASS_S * (1.4 if rows > 1 else 1))
    assert cost.seconds(PRICES) == pytest.approx(0.2 * PASS_S, abs=0.03 * PASS_S)


def asked(pace: Pace, cost: AskCost, expected: Gain, steps: int, *, prices: Prices = PRICES, free: bool = True) -> list[int]:
    return [turn for turn in range(steps) if pace.due(expected, cost, prices, turn=turn, wanted=True, free=free)]


def test_what_pays_is_asked_at_every_step() -> None:
    cost = known(0.2)
    assert asked(Pace(), cost, gain(0.5 * PASS_S), 50) == list(range(50))
    assert asked(Pace(), cost, gain(-1.0, like_last_s=0.5 * PASS_S), 50) == list(range(50))
    # Where drafting slows no pass, whatever drafts bring.
    free = AskCost()
    for drafts in [0, 1] * 100:
        free.learn(requests=1, rows=1, drafts=drafts, seconds=PASS_S, expected_s=PASS_S)
    assert asked(Pace(), free, gain(-1.0), 50) == list(range(50))


def test_before_it_is_known_what_drafts_cost_they_are_not_asked_at_every_step() -> None:
    many = Prices(pass_s=PASS_S, row_s=0.0, requests=64)
    assert asked(Pace(), AskCost(), gain(0.0), 70, prices=many) == [0, 32, 64]


@pytest.mark.parametrize(("slower", "requests", "passes"), [(0.06, 1, 1), (0.2, 1, 1), (0.05, 4, 1), (0.1, 1, 2)])
def test_what_does_not_pay_takes_a_small_share_of_time(slower: float, requests: int, passes: int) -> None:
    prices = Prices(pass_s=PASS_S, row_s=0.0, requests=requests)
    found = asked(Pace(), known(slower, requests), gain(-1.0, passes=passes), 640, prices=prices)
    share = len(found) * requests * passes * slower / 640
    assert 0.005 < share < 0.025
    assert max(later - earlier for earlier, later in itertools.pairwise(found)) <= MOST_STEPS


def test_it_becomes_rare_by_and_by_and_frequent_at_once() -> None:
    cost, pace = known(0.2), Pace()
    assert asked(pace, cost, gain(PASS_S), 1) == [0]
    found = asked(pace, cost, gain(0.0), 64)
    assert found == [0, 2, 4, 8, 16, 32]
    assert asked(pace, cost, gain(0.0, like_last_s=PASS_S), 3) == [0, 1, 2]


def test_the_step_that_will_ask_is_foreseen() -> None:
    cost, pace = known(0.2), Pace()
    foreseen = []
    for turn in range(100):
        # It pays, then it does not, then the last draft was good.
        expected = gain(PASS_S if turn < 10 else 0.0, like_last_s=PASS_S if turn > 80 else -1.0)
        foreseen.append(pace.expects)
        if pace.due(expected, cost, PRICES, turn=turn, wanted=True, free=True) != foreseen[-1]:
            assert turn in (10, 11, 81), turn
    assert all(foreseen[:10]) and all(foreseen[82:]) and sum(foreseen[20:80]) < 5


def test_a_busy_origin_is_told_sometimes_and_not_asked_too_often() -> None:
    assert asked(Pace(), known(0.2), gain(-1.0), 100, free=False) == [31, 63, 95]


def test_a_moment_in_which_the_budget_wants_nodes_is_not_missed() -> None:
    cost, pace = known(0.2), Pace()
    found = [turn for turn in range(1, 30) if pace.due(gain(-1.0), cost, PRICES, turn=turn, wanted=turn == 21, free=True)]
    assert 21 in found
    assert len(found) <= 3


@pytest.mark.parametrize(("slower", "requests", "average_s", "asks"), [
    # One fruitless draft of each request in 32 steps takes 1 % of them at most.
    (0.2, 1, -1.0, True), (0.01, 16, -1.0, True), (0.2, 4, -1.0, False), (0.05, 16, -1.0, False),
    # However many there are: drafts pay on average, or slow nothing.
    (0.2, 16, 0.3 * PASS_S, True), (0.2, 16, 0.1 * PASS_S, False), (0.0, 64, 0.0, True),
])  # fmt: skip
def test_who_begins_asks_where_that_pays_or_costs_little(slower: float, requests: int, average_s: float, asks: bool) -> None:
    prices = Prices(pass_s=PASS_S, row_s=0.0, requests=requests)
    assert opening_pays(average_s, known(slower), prices) == asks


def test_before_the_first_pass_few_requests_find_out_what_drafts_cost() -> None:
    assert opening_pays(0.0, AskCost(), Prices(pass_s=PASS_S, row_s=0.0, requests=4))
    assert not opening_pays(0.0, AskCost(), Prices(pass_s=PASS_S, row_s=0.0, requests=5))


# --- with the loop, on a simulated clock ----------------------------------------------------------------------------


class _Link(InProcessDraftLink):
    """Notes whether the drafter was told anything, and everything that it was told."""

    told = 0

    def __init__(self, drafter: NeighbourDrafter) -> None:
        super().__init__(drafter)
        self.tokens: dict[str, list[int]] = {}
        self.opened: list[OpenSession] = []
        self.reports: list[StepReport] = []

    @override
    def open(self, message: OpenSession) -> None:
        self.tokens[message.session_id] = list(message.tokens)
        self.opened.append(message)
        super().open(message)

    @override
    def step(self, message: StepReport) -> None:
        self.told += 1
        self.reports.append(message)
        self.tokens[message.session_id] += message.committed
        assert len(self.tokens[message.session_id]) == message.length
        super().step(message)

    @override
    def steps(self, reports: SentReports) -> None:
        for report in reports.alone():
            self.step(report)


class NeighbourDrafter(SlowDrafter):
    """A drafter on the target's cores; drafts what is right from a length on."""

    def __init__(self, seconds: Callable[[], float], mood: str, good_from: int = 1 << 30) -> None:
        super().__init__(seconds, mood)
        self.good_from = good_from
        self.drafting = 0
        self.asked: list[int] = []

    @override
    async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:  # type: ignore[override]
        length = len(self.sessions[session_id])
        if length >= self.good_from:
            self.mood = "good"
        if max_nodes:
            self.asked.append(length)
        self.drafting += 1
        try:
            return await super()._draft(session_id, max_nodes)
        finally:
            self.drafting -= 1


async def took(drafter: NeighbourDrafter, slower: float, requests: int = 1, rounds: int = 2) -> tuple[list[float], _Link]:
    """Simulated seconds of each round of ``requests`` at once, over those of plain decoding."""
    link, tokens, numbers = _Link(drafter), 300, random.Random(1)

    def pass_s() -> float:
        told, link.told = link.told, 0
        share = min(1.0, max(told, drafter.drafting) / requests)
        return PASS_S * (1 + slower * share) * (1 + numbers.gauss(0, 0.05))

    loop = DecodingLoop(
        ToyTarget(), [origin(link)], SimulatedBudget(PASS_S), LoopConfig(draft_deadline_s=0.025), SimulatedWorker(pass_s)
    )
    await loop.start()
    clock, found = asyncio.get_running_loop(), []
    for each in range(rounds):
        began = clock.time()
        wanted = [request(f"{each}-{i}", [1, 2, i], max_tokens=tokens, ignore_eos=True) for i in range(requests)]
        answers = await asyncio.gather(*(collect(loop, one) for one in wanted))
        found.append((clock.time() - began) / (tokens * PASS_S))
        for one, (answer, _, _) in zip(wanted, answers, strict=True):
            # All but the last step is reported, in order. Of a request that is decoded in quiet, nobody is told.
            told = link.tokens.get(one.request_id)
            if told is None:
                continue
            assert told == [*one.prompt, *answer][: len(told)]
            assert len(told) >= len(one.prompt) + tokens - 7
    await loop.stop()
    return found, link


@pytest.mark.examples(6)
@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("slower", [0.25, 0.1, 0.5])
@pytest.mark.parametrize("delay", [0.0005, 0.004, 0.014])
def test_a_neighbour_that_brings_nothing_costs_nothing(delay: float, slower: float, requests: int) -> None:
    found, _ = run(took(NeighbourDrafter(lambda: delay, "random"), slower, requests, rounds=3))
    # The first requests pay for what the others know. A draft that costs half a pass, in one of 32 steps, is 1.6 % already.
    assert found[0] <= 1.05
    assert sum(found[1:]) / 2 <= (1.025 if slower < 0.5 else 1.04)


@pytest.mark.examples(4)
@pytest.mark.parametrize("slower", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("delay", [0.0005, 0.004, 0.009])
def test_one_that_brings_much_is_asked_at_every_step(delay: float, slower: float) -> None:
    drafter = NeighbourDrafter(lambda: delay, "good")
    found, link = run(took(drafter, slower))
    # Seven tokens a step: no step was without its draft, and none was told of later.
    assert len(drafter.asked) == 2 * 44
    assert all(len(report.committed) <= 7 for report in link.reports)
    assert found[1] <= 0.3 + slower / 7


def test_one_that_slows_nothing_is_asked_all_the_time() -> None:
    drafter = NeighbourDrafter(lambda: 0.004, "random")
    run(took(drafter, 0.0))
    assert len(drafter.asked) > 0.7 * 600


@pytest.mark.exhaustive
def test_many_at_once_ask_for_nothing_at_first_where_drafts_bring_nothing() -> None:
    """One alone asks; sixteen that share the cores with their drafter do not, and are drafted for all the same if it pays."""
    _, alone = run(took(NeighbourDrafter(lambda: 0.0005, "random"), 0.25, 1, rounds=3))
    assert [message.max_nodes > 0 for message in alone.opened] == [True] * 3
    _, many = run(took(NeighbourDrafter(lambda: 0.0005, "random"), 0.25, 16, rounds=3))
    assert not any(message.max_nodes for message in many.opened)
    found, good = run(took(NeighbourDrafter(lambda: 0.0005, "good"), 0.25, 16, rounds=2))
    assert [message.max_nodes > 0 for message in good.opened] == [False] * 16 + [True] * 16
    assert found[1] < found[0] < 0.5


@pytest.mark.parametrize("delay", [0.0005, 0.004])
def test_a_text_that_begins_to_repeat_is_noticed_soon(delay: float) -> None:
    drafter = NeighbourDrafter(lambda: delay, "random", good_from=200)
    run(took(drafter, 0.25, rounds=1))
    before = [at for at in drafter.asked if 150 <= at < 200]
    after = [at for at in drafter.asked if at >= 200]
    assert len(before) <= 10
    assert after[0] <= 200 + MOST_STEPS
    # That first draft may be too late for its step. From then on, every step asks, and takes seven tokens.
    gaps = [later - earlier for earlier, later in itertools.pairwise(after)]
    assert len(gaps) > 10
    assert gaps[2:] == [7] * (len(gaps) - 2)
