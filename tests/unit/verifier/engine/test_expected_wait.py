"""A bound on the time that requests wait: what is admitted is answered soon, and what is refused is refused at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.verifier.engine.admission import Admission
from services.verifier.engine.expected_wait import SlotTimes, expected_wait
from services.verifier.engine.fair_queue import FairQueue
from services.verifier.engine.live_request import LiveRequest
from speculation.errors import ResourceExhausted
from speculation.messages import GenerationRequest
from tests.engine.fakes import PLAIN, collect, request
from tests.engine.simulated import run, simulated
from tests.engine.traffic import CAPACITY, PASS_S, SECONDS, SLOTS, TOKENS, Traffic

# Seconds of an answer, and the longest wait for one that may last half as long again, to the end of a pass.
ANSWER_S = TOKENS * PASS_S
BOUND_S = 0.4 * ANSWER_S


def loaded(times: float, seed: int = 1, bound_s: float | None = BOUND_S) -> Traffic:
    """Seconds of as many times the requests that the slots can serve."""
    return run(Traffic(seed, max_wait_s=bound_s).all(a=(times * CAPACITY, TOKENS)))


def check_overload(over: Traffic, busy: Traffic) -> None:
    assert over.p99("a") <= 1.5 * loaded(0.25).p99("a")
    # Until the first answers have ended, nothing is known of how long they take.
    assert over.longest_queue <= 32 + SLOTS
    assert len(over.took["a"]) >= 0.9 * CAPACITY * SECONDS
    assert sum(after > PASS_S for after, _ in over.refusals) < 0.05 * len(over.refusals)
    # A wait within the bound is not refused for fear.
    assert busy.refused["a"] < 0.15 * len(busy.took["a"])


@pytest.mark.examples(3)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tenfold_load_keeps_admitted_answers_fast(seed: int) -> None:
    check_overload(loaded(10, seed), loaded(0.9))


@pytest.mark.exhaustive
def test_without_the_bound_they_are_slow() -> None:
    with pytest.raises(AssertionError):
        check_overload(loaded(10, bound_s=None), loaded(0.9))


@pytest.mark.examples(2)
@pytest.mark.parametrize("factor", [0.0, 5.0], ids=["never waits", "five times too long"])
def test_a_wrong_estimate_is_noticed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    true: Callable[[Admission, GenerationRequest], float] = Admission._wait_s
    monkeypatch.setattr(Admission, "_wait_s", lambda self, wanted: factor * true(self, wanted))
    with pytest.raises(AssertionError):
        check_overload(loaded(10), loaded(0.9))


@pytest.mark.exhaustive
def test_a_greedy_tenant_moves_nobody_elses_answers() -> None:
    usual = {"a": (0.25 * CAPACITY, TOKENS), "b": (0.25 * CAPACITY, TOKENS)}
    before = run(Traffic(1, max_wait_s=BOUND_S).all(**usual))
    after = run(Traffic(1, max_wait_s=BOUND_S).all(**usual, greedy=(5 * CAPACITY, TOKENS)))
    for tenant in usual:
        assert after.p99(tenant) <= 1.3 * before.p99(tenant)
        assert after.refused[tenant] <= before.refused[tenant] + 1
    assert after.tokens["greedy"] > 0.25 * CAPACITY * TOKENS * SECONDS


def test_who_comes_again_when_told_is_admitted() -> None:
    async def main() -> None:
        traffic = Traffic(0, max_wait_s=BOUND_S)
        await traffic.loop.start()
        await traffic.one("a", 0)
        many = [asyncio.create_task(traffic.one("a", number)) for number in range(1, 4 * SLOTS)]
        await asyncio.sleep(ANSWER_S / 10)
        assert traffic.loop.running == SLOTS
        with pytest.raises(ResourceExhausted, match="max_wait_s") as refused:
            await collect(traffic.loop, request("b", [3], PLAIN, max_tokens=2))
        await asyncio.sleep(refused.value.retry_after_s + 2 * PASS_S)
        await collect(traffic.loop, request("b", [3], PLAIN, max_tokens=2))
        await asyncio.gather(*many)
        await traffic.loop.stop()

    run(main())


def test_a_request_that_goes_on_elsewhere_may_wait() -> None:
    async def main() -> None:
        traffic = Traffic(0, max_wait_s=BOUND_S)
        await traffic.loop.start()
        await traffic.one("a", 0)
        whole, _, _ = await collect(traffic.loop, request("whole", [3, 4], PLAIN, max_tokens=8, ignore_eos=True))
        many = [asyncio.create_task(traffic.one("a", number)) for number in range(1, SLOTS + 1)]
        # All slots are taken.
        await asyncio.sleep(PASS_S)
        moved = replace(
            request("moved", [3, 4], PLAIN, max_tokens=8, ignore_eos=True), committed=tuple(whole[:5]), tenant="a"
        )
        rest, _, steps = await collect(traffic.loop, moved)
        assert whole[:5] + rest == whole
        assert steps[0].queue_s > BOUND_S
        await asyncio.gather(*many)
        await traffic.loop.stop()

    run(main())


def test_the_earliest_slots_go_to_those_ahead() -> None:
    assert expected_wait([0.0, 0.3], 0, 1.0) == 0.0
    assert expected_wait([0.0, 0.3], 1, 1.0) == 0.3
    assert expected_wait([0.0, 0.3], 3, 1.0) == 1.3


@simulated
async def test_what_is_left_of_an_answer_depends_on_its_age() -> None:
    times = SlotTimes()
    assert times.mean_s is None
    for name, seconds in (("short", 1.0), ("long", 5.0)):
        times.taken(name)
        await asyncio.sleep(seconds)
        times.ended(name)
    times.ended("never began")
    assert times.mean_s == 3.0
    times.taken("new")
    assert times.left_s("new") == 3.0
    await asyncio.sleep(2.0)
    assert times.left_s("new") == 3.0
    times.given_up("new")
    await asyncio.sleep(10.0)
    assert times.left_s("new") == 3.0
    times.taken("new")
    await asyncio.sleep(4.0)
    # Six seconds in all: one more than any other.
    assert times.left_s("new") == 1.0


def test_who_is_ahead_follows_tenants_weights_and_priorities() -> None:
    def live(tenant: str, number: int = 0, weight: float = 1.0, priority: int = 0) -> LiveRequest:
        wanted = replace(request(f"{tenant}{number}", [3], PLAIN), tenant=tenant, weight=weight, priority=priority)
        return LiveRequest(wanted, frozenset(), vocab_size=8, max_model_len=64, max_nodes=0, by_paper=False)

    queue = FairQueue()
    first = live("a", -1)
    queue.append(first)
    queue.remove(first)
    queue.begun(first)
    first.computed = 10
    queue.count([first])
    queue.ended(first)
    for number in range(4):
        queue.append(live("a", number))
    assert queue.ahead(live("a").message, ()) == 4
    assert queue.ahead(live("a", priority=-1).message, ()) == 0
    # A new tenant takes turns with the other, from a credit that is larger than all that waits; a heavy one twice as often.
    queue._served["b"] = queue._served["a"]
    for number in range(4):
        queue.append(live("b", number, weight=2.0))
    assert queue.ahead(live("b", weight=2.0).message, ()) == 4 + 3
    assert queue.ahead(live("new").message, ()) == 0
