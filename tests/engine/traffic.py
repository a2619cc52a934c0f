"""Traffic of several tenants for a simulated verifier."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from concurrent.futures import Executor
from dataclasses import replace
from typing import cast

from services.verifier.engine.config import LoopConfig
from services.verifier.engine.loop import DecodingLoop
from speculation.budget import FixedBudget
from speculation.errors import ResourceExhausted
from tests.engine.fakes import PLAIN, ToyTarget, collect, request
from tests.engine.simulated import SimulatedWorker

SLOTS, TOKENS, PASS_S, SECONDS = 4, 10, 0.01, 5.0
# Answers per second that the simulated verifier can give.
CAPACITY = SLOTS / (TOKENS * PASS_S)


class Traffic:
    """Requests of several tenants that arrive at random times, and how long their answers took in seconds.

    Attributes:
        refusals: seconds after which a request was refused, and those after which it should come again.
    """

    def __init__(self, seed: int, max_waiting: int = 64, slots: int = SLOTS, max_wait_s: float | None = None) -> None:
        self.seed = seed
        config = LoopConfig(max_num_seqs=slots, max_waiting=max_waiting, max_wait_s=max_wait_s)
        worker = cast(Executor, SimulatedWorker(lambda: PASS_S))
        self.loop = DecodingLoop(ToyTarget(rooms=slots), [], FixedBudget(max_nodes=0), config, worker)
        self.took: dict[str, list[float]] = {}
        self.refused: Counter[str] = Counter()
        self.refusals: list[tuple[float, float]] = []
        self.tokens: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        self.longest_queue = 0

    async def one(self, tenant: str, number: int, tokens: int = TOKENS, weight: float = 1.0) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        wanted = request(f"{tenant}{number}", [3, 4, 5], PLAIN, max_tokens=tokens, ignore_eos=True)
        try:
            answer, _, _ = await collect(self.loop, replace(wanted, tenant=tenant, weight=weight))
        except ResourceExhausted as refusal:
            self.refused[tenant] += 1
            self.refusals.append((clock() - began, refusal.retry_after_s))
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
