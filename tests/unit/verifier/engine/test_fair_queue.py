"""Fair between tenants: on a simulated clock, a greedy tenant moves nobody's slowest answers by much."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from services.verifier.engine import fair_queue
from speculation.errors import InvalidArgument, ResourceExhausted
from tests.engine.fakes import PLAIN, collect, request
from tests.engine.simulated import run
from tests.engine.traffic import CAPACITY, PASS_S, SECONDS, SLOTS, TOKENS, Traffic


def test_a_tenants_lower_priorities_go_first() -> None:
    async def main() -> list[str]:
        traffic = Traffic(0, max_waiting=6, slots=1)
        await traffic.loop.start()
        order: list[str] = []

        async def one(tenant: str, priority: int, number: int) -> None:
            wanted = replace(request(f"{tenant}{priority}.{number}", [3], PLAIN, max_tokens=4, ignore_eos=True))
            try:
                await collect(traffic.loop, replace(wanted, tenant=tenant, priority=priority))
            except ResourceExhausted:
                order.append(f"refused {wanted.request_id}")
                return
            order.append(wanted.request_id)

        tasks = [asyncio.create_task(one("a", 0, 0))]
        await asyncio.sleep(PASS_S / 2)
        for priority, number in ((5, 1), (0, 2), (-1, 3), (5, 4), (-1, 5), (0, 6)):
            tasks.append(asyncio.create_task(one("a", priority, number)))
            await asyncio.sleep(0)
        # The line is full: the last of the highest number makes room for a lower one, and none for the same.
        tasks.append(asyncio.create_task(one("a", 2, 7)))
        tasks.append(asyncio.create_task(one("a", 5, 8)))
        await asyncio.gather(*tasks)
        await traffic.loop.stop()
        return order

    order = run(main())
    assert set(order[:2]) == {"refused a5.4", "refused a5.8"}
    assert order[2:] == ["a0.0", "a-1.3", "a-1.5", "a0.2", "a0.6", "a2.7", "a5.1"]


@pytest.mark.examples(2)
@pytest.mark.parametrize("length", [1, 5], ids=["as long", "five times as long"])
def test_a_greedy_tenant_does_not_move_the_others_slowest_answers(length: int) -> None:
    usual = {"a": (0.25 * CAPACITY, TOKENS), "b": (0.25 * CAPACITY, TOKENS)}
    before = run(Traffic(1).all(**usual))
    after = run(Traffic(1).all(**usual, greedy=(5 * CAPACITY / length, TOKENS * length)))
    for tenant in usual:
        assert after.refused[tenant] == 0
        assert after.p99(tenant) <= 1.3 * before.p99(tenant)
    assert after.refused["greedy"] > 0
    # What the others leave, the greedy one gets.
    assert after.tokens["greedy"] > 0.25 * CAPACITY * TOKENS * SECONDS
    assert after.longest_queue <= 64 + SLOTS


def test_weights_are_shares() -> None:
    async def main() -> Counter[str]:
        traffic = Traffic(2, slots=4)
        await traffic.loop.start()
        many = [
            asyncio.create_task(traffic.one(tenant, number, weight=weight))
            for number in range(60)
            for tenant, weight in (("heavy", 3.0), ("light", 1.0))
        ]
        while traffic.tokens.total() < 60 * TOKENS:
            await asyncio.sleep(PASS_S)
        seen = Counter(traffic.tokens)
        await asyncio.gather(*many)
        await traffic.loop.stop()
        return seen

    seen = run(main())
    assert 2.2 < seen["heavy"] / seen["light"] < 4.0


def test_the_queue_is_bounded_and_the_one_with_the_most_is_refused() -> None:
    async def main() -> Traffic:
        traffic = Traffic(3, max_waiting=6, slots=1)
        await traffic.loop.start()
        tasks = [asyncio.create_task(traffic.one("greedy", number)) for number in range(20)]
        await asyncio.sleep(5 * PASS_S)
        assert traffic.loop.waiting == 6
        assert traffic.refused == {"greedy": 13}
        tasks += [asyncio.create_task(traffic.one("other", number)) for number in range(2)]
        await asyncio.gather(*tasks)
        await traffic.loop.stop()
        return traffic

    traffic = run(main())
    assert traffic.refused == {"greedy": 15}
    assert traffic.tokens["other"] == 2 * TOKENS


@pytest.mark.parametrize("why", ["it can have no token", "it would wait for too long"])
def test_who_is_refused_takes_nobodys_place(why: str) -> None:
    async def main() -> Traffic:
        traffic = Traffic(3, max_waiting=6, slots=1, max_wait_s=100.0)
        await traffic.loop.start()
        tasks = [asyncio.create_task(traffic.one("greedy", number)) for number in range(8)]
        # How long answers take is known by then.
        await asyncio.sleep(2.5 * TOKENS * PASS_S)
        missing = 6 - traffic.loop.waiting
        tasks += [asyncio.create_task(traffic.one("greedy", 8 + number)) for number in range(missing)]
        await asyncio.sleep(0)
        assert traffic.loop.waiting == 6
        asked = replace(request("other", [3, 4, 5], PLAIN, max_tokens=TOKENS), tenant="other")
        if why == "it can have no token":
            nothing = replace(asked.sampling, allowed_token_ids=(5,), bad_words=((5,),))
            with pytest.raises(InvalidArgument):
                await collect(traffic.loop, replace(asked, sampling=nothing))
        else:
            traffic.loop.config = traffic.loop._requests._config = replace(traffic.loop.config, max_wait_s=1e-6)
            with pytest.raises(ResourceExhausted):
                await collect(traffic.loop, asked)
            traffic.loop.config = traffic.loop._requests._config = replace(traffic.loop.config, max_wait_s=100.0)
        await asyncio.gather(*tasks)
        await traffic.loop.stop()
        return traffic

    traffic = run(main())
    # Of eight at once, one had no place; nobody else lost one.
    assert traffic.refused == {"greedy": 1}


@pytest.mark.parametrize("newcomers", ["greedy", "other"])
def test_begun_answers_wait_beside_the_bounds_of_new_requests(newcomers: str) -> None:
    async def main() -> list[str]:
        loop, ended = Traffic(3, max_waiting=2, slots=1).loop, list[str]()
        await loop.start()
        wanted = replace(request("x", [3, 4, 5], PLAIN, max_tokens=TOKENS, ignore_eos=True), tenant="greedy")
        whole, _, _ = await collect(loop, wanted)

        async def ask(kind: str, number: int, tenant: str, committed: int = 0) -> None:
            own = replace(wanted, request_id=f"{kind}{number}", tenant=tenant, committed=tuple(whole[:committed]))
            try:
                assert (await collect(loop, own))[0] == whole[committed:]
                ended.append(kind)
            except ResourceExhausted:
                ended.append(f"{kind} refused")

        tasks = [asyncio.create_task(ask("new", number, newcomers)) for number in range(5)]
        await asyncio.sleep(PASS_S)
        assert ended == ["new refused"] * 2
        tasks += [asyncio.create_task(ask("begun", number, "greedy", committed=4)) for number in range(4)]
        await asyncio.sleep(PASS_S)
        assert loop.waiting == 2 + 4
        # Nobody takes their places, and they take nobody's: one of a third tenant goes before one of the newcomers.
        tasks += [asyncio.create_task(ask("third", number, "third")) for number in range(2)]
        tasks += [asyncio.create_task(ask("new", 10 + number, newcomers)) for number in range(2)]
        await asyncio.gather(*tasks)
        await loop.stop()
        return ended

    ended = run(main())
    counts = Counter(ended)
    assert counts == {"begun": 4, "new": 2, "new refused": 5, "third": 1, "third refused": 1}
    if newcomers == "greedy":
        # Of one tenant the begun ones go first; one of the others had the slot.
        assert [kind for kind in ended if kind in ("begun", "new")] == ["new", *["begun"] * 4, "new"]


def test_absence_saves_up_no_claims_beyond_a_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "CREDIT", 0.0)

    async def main() -> list[str]:
        traffic = Traffic(4, slots=1)
        await traffic.loop.start()
        await traffic.one("back", 0, tokens=2)
        for number in range(10):
            await traffic.one("busy", number)
        order: list[str] = []

        async def noted(tenant: str, number: int) -> None:
            await traffic.one(tenant, number)
            order.append(tenant)

        await asyncio.gather(*(noted(tenant, 100 + n) for n in range(4) for tenant in ("busy", "back")))
        await traffic.loop.stop()
        return order

    order = run(main())
    assert order[:4].count("busy") == 2


def test_preempted_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "QUANTUM", 8.0)

    async def main() -> tuple[list[int], list[int], int]:
        traffic = Traffic(5, slots=2)
        wanted = replace(request("x", [3, 4, 5], PLAIN, max_tokens=60, temperature=1.0, seed=9, ignore_eos=True), tenant="g")
        await traffic.loop.start()
        expected, _, _ = await collect(traffic.loop, replace(wanted, request_id="alone"))
        many = [asyncio.create_task(collect(traffic.loop, replace(wanted, request_id=f"x{n}"))) for n in range(2)]
        await asyncio.sleep(10 * PASS_S)
        await traffic.one("other", 1)
        answers = [(await each)[0] for each in many]
        await traffic.loop.stop()
        assert answers[0] == answers[1]
        return expected, answers[0], traffic.loop.stats.preemptions

    expected, answer, preemptions = run(main())
    assert answer == expected
    assert preemptions == 1
