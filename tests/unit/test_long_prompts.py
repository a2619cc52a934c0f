"""Long prompts beside requests that draft, on a simulated clock: drafts must not make first tokens come later."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.passes import Part, whole_pass
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.messages import GenerationRequest, Progress
from speculation.types import TokenTree
from tests import fakes
from tests.fakes import PLAIN, RandomDrafter, ToyTarget, collect, request
from tests.simulated import SimulatedWorker, simulated

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

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        if function is whole_pass:
            parts: list[Part] = arguments[1]
            self.pass_s = FIXED_S + ROW_S * sum(len(part.rows.tokens) for part in parts)
            if any(part.chain > 1 for part in parts):
                self.with_prompts.append(self.pass_s)
        return super().submit(function, *arguments, **keywords)


class SimulatedTimes(MeasuredBudget):
    """Learns the simulated seconds of passes, not those that the simulation takes."""

    worker: RowsTakeTime

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        super().learn(load, self.worker.pass_s, outcomes)

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
