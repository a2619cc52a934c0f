"""Long prompts beside requests that draft and beside short prompts, on a simulated clock: neither makes first tokens come late."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.finishing import whole_pass
from services.verifier.engine.passes import PassWork, shared_rows
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.messages import GenerationRequest, Progress
from speculation.types import TokenTree
from tests.engine import fakes
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, request
from tests.engine.simulated import SimulatedWorker, run, simulated

# A step of 70 rows takes what prompts may stretch it to; one row takes 5.5 ms.
FIXED_S, ROW_S, MAX_STEP_S = 0.005, 0.0005, 0.05
PROMPT, LONG, DECODING = 400, 6, 8


class LongTarget(ToyTarget):
    max_model_len = 4096


class RowsTakeTime(SimulatedWorker):
    """Notes how long each step was that computed rows of prompts."""

    def __init__(self) -> None:
        super().__init__(lambda: self.pass_s)
        self.pass_s = 0.0
        self.with_prompts: list[float] = []

    @override
    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        if function is whole_pass:
            work: PassWork = arguments[1]
            self.pass_s = FIXED_S + ROW_S * sum(len(rows.tokens) for rows in work.rows)
            if any(part.chain > 1 for part in work.parts):
                self.with_prompts.append(self.pass_s)
        return super().submit(function, *arguments, **keywords)


class SimulatedTimes(MeasuredBudget):
    """Learns the simulated seconds of passes, not those that the simulation takes."""

    worker: RowsTakeTime

    @override
    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        super().learn(load, self.worker.pass_s, outcomes)

    @override
    def learn_prompts(self, load: Load, seconds: float) -> None:
        super().learn_prompts(load, self.worker.pass_s)


async def first_tokens(*, drafts: bool) -> tuple[float, float]:
    """The mean time to the first token of long prompts that come together, and the longest step with prompts, in seconds."""
    worker, numbers = RowsTakeTime(), random.Random(1)
    table = CostTable(by_rows={1: FIXED_S + ROW_S, 1001: FIXED_S + 1001 * ROW_S}, per_request=0.0, per_key=0.0)
    budget = SimulatedTimes(table, max_nodes=6, max_step_s=MAX_STEP_S)
    budget.worker = worker
    plan = None if drafts else PLAIN
    link = InProcessDraftLink(RandomDrafter(mood="good"))
    async with fakes.decoding(LongTarget(), link, budget=budget, worker=worker, max_num_seqs=32) as loop:
        texts = [request(f"text {at}", [at + 1, 2, 3], plan, max_tokens=3000, ignore_eos=True) for at in range(DECODING)]
        beside = [asyncio.create_task(collect(loop, each)) for each in texts]
        await asyncio.sleep(2.0)
        worker.with_prompts.clear()

        async def waits(wanted: GenerationRequest) -> float:
            began = asyncio.get_running_loop().time()
            async for event in loop.generate(wanted):
                if isinstance(event, Progress):
                    return asyncio.get_running_loop().time() - began
            raise AssertionError("no token")

        prompts: Sequence[list[int]] = [[numbers.randrange(1, 16) for _ in range(PROMPT)] for _ in range(LONG)]
        took = await asyncio.gather(*(waits(request(f"long {at}", each, plan)) for at, each in enumerate(prompts)))
        for each in beside:
            each.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return statistics.mean(took), max(worker.with_prompts)


@simulated
async def test_drafts_take_none_of_the_time_of_long_prompts() -> None:
    (plainly, _), (drafted, longest_s) = [await first_tokens(drafts=drafts) for drafts in (False, True)]
    # Four fifths of the longest step are planned for.
    assert longest_s <= 0.8 * MAX_STEP_S + 1e-9
    assert drafted <= 1.02 * plainly


async def time_to_first_tokens(lengths: Sequence[int]) -> list[float]:
    """Seconds to the first token of prompts of such lengths, which come together in this order."""
    worker, numbers = RowsTakeTime(), random.Random(1)
    async with fakes.decoding(LongTarget(), worker=worker, max_num_seqs=32, max_batched_tokens=100) as loop:

        async def waits(at: int, length: int) -> float:
            began = asyncio.get_running_loop().time()
            prompt = [numbers.randrange(1, 16) for _ in range(length)]
            async for _ in loop.generate(request(f"prompt {at}", prompt, PLAIN, max_tokens=1)):
                return asyncio.get_running_loop().time() - began
            raise AssertionError("no token")

        return list(await asyncio.gather(*(waits(at, length) for at, length in enumerate(lengths))))


@pytest.mark.parametrize("lengths", [[3000, 40, 45], [3000, 2900, 40, 45]])
def test_short_prompts_do_not_wait_behind_long_ones(lengths: list[int]) -> None:
    *long, one, other = run(time_to_first_tokens(lengths))
    # A pass of 100 rows takes 0.055 s. The short ones get half of the first two; what is long takes 30 passes or more.
    assert one <= 0.06
    assert other <= 0.12
    assert min(long) > 30 * 0.055
    # The first one waits for no other that is long.
    assert long[0] < 33 * 0.055


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(1, 300))
def test_rows_of_a_pass_are_shared(left: list[int], most: int) -> None:
    given_rows = shared_rows(left, most)
    prompts = [(rows, wanted) for rows, wanted in zip(given_rows, left, strict=True) if wanted > 1]
    assert all(rows == 1 for rows, wanted in zip(given_rows, left, strict=True) if wanted == 1)
    # None is idle, and none gets more than it wants.
    assert sum(rows for rows, _ in prompts) == min(most, sum(wanted for _, wanted in prompts))
    assert all(rows <= wanted for rows, wanted in prompts)
    if prompts:
        rows, wanted = prompts[0]
        assert rows >= min(wanted, most / 2)
        # Of the others, one that is longer gets none before a shorter one has all.
        others = sorted(prompts[1:], key=lambda each: each[1])
        assert all(rows == wanted for at, (rows, wanted) in enumerate(others) if any(more for more, _ in others[at + 1 :]))
