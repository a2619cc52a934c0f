"""Fair between tenants: on a simulated clock, a greedy tenant moves nobody's slowest answers by much."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from concurrent.futures import Executor
from dataclasses import replace
from typing import cast

import pytest

from services.verifier.engine import fair_queue
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.loop import DecodingLoop
from speculation.budget import FixedBudget
from speculation.errors import ResourceExhausted
from tests.fakes import PLAIN, ToyTarget, collect, request
from tests.simulated import SimulatedWorker, run

SEATS, TOKENS, PASS_S, SECONDS = 4, 10, 0.01, 5.0


class Traffic:
    """Requests of several tenants that arrive at random times, and how long their answers took in seconds."""

    def __init__(self, seed: int, max_waiting: int = 64, seats: int = SEATS) -> None:
        self.seed = seed
        config = LoopConfig(max_num_seqs=seats, max_waiting=max_waiting)
        worker = cast(Executor, SimulatedWorker(lambda: PASS_S))
        self.loop = DecodingLoop(ToyTarget(rooms=seats), [], FixedBudget(max_nodes=0), config, worker)
        self.took: dict[str, list[float]] = {}
        self.refused: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        self.longest_queue = 0

    async def one(self, tenant: str, number: int, tokens: int = TOKENS, weight: float = 1.0) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        wanted = request(f"{tenant}{number}", [3, 4, 5], PLAIN, max_tokens=tokens, ignore_eos=True)
        try:
            answer, _, _ = await collect(self.loop, replace(wanted, tenant=tenant, weight=weight))
        except ResourceExhausted:
            self.refused[tenant] += 1
            return
        assert len(answer) == tokens
        self.tokens[tenant] += tokens
        self.took.setdefault(tenant, []).append(clock() - began)

    async def arriving(self, tenant: str, per_second: float, seconds: float, tokens: int = TOKENS) -> None:
        clock, number = asyncio.get_running_loop().time, 0
        source = random.Random(f"{self.seed} {tenant}")
        end = clock() + seconds
        while clock() < end:
            await asyncio.sleep(source.expovariate(per_second))
            self.tasks.append(asyncio.create_task(self.one(tenant, number, tokens)))
            self.longest_queue = max(self.longest_queue, self.loop.waiting)
            number += 1

    async def all(self, greedy: tuple[float, int] | None = None, **rates: tuple[float, int]) -> Traffic:
        await self.loop.start()
        # The greedy one has been there for a second when the others come.
        everybody = [self.arriving(name, rate, SECONDS, tokens) for name, (rate, tokens) in rates.items()]
        if greedy is not None:
            self.tasks.append(asyncio.create_task(self.arriving("greedy", greedy[0], SECONDS + 1, greedy[1])))
            await asyncio.sleep(1)
        await asyncio.gather(*everybody)
        while not all(task.done() for task in self.tasks):
            await asyncio.gather(*self.tasks)
        await self.loop.stop()
        return self

    def p99(self, tenant: str) -> float:
        times = sorted(self.took[tenant])
        return times[int(0.99 * (len(times) - 1))]


def test_a_tenants_lower_priorities_go_first() -> None:
    async def main() -> list[str]:
        traffic = Traffic(0, max_waiting=6, seats=1)
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


# Answers per second that the simulated verifier can give.
CAPACITY = SEATS / (TOKENS * PASS_S)


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
    assert after.longest_queue <= 64 + SEATS


def test_weights_are_shares() -> None:
    async def main() -> Counter[str]:
        traffic = Traffic(2, seats=4)
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
        traffic = Traffic(3, max_waiting=6, seats=1)
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


def test_absence_saves_up_no_claims_beyond_a_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "CREDIT", 0.0)

    async def main() -> list[str]:
        traffic = Traffic(4, seats=1)
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
        traffic = Traffic(5, seats=2)
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
