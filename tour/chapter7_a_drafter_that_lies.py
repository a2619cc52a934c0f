"""Chapter 7. A drafter that lies: it may cost time, and cannot change a token.

From here on the engine is the real one, too: the decoding loop that `outrider serve` runs, with a drafter behind a link.
The drafters of this chapter do what a broken or hostile one might do. Some lies are refused (ids that are no tokens, trees
that are no trees), others look like honest mistakes. Neither reaches the function that chooses tokens.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.origins import Origin
from speculation.budget import Budget, FixedBudget, MeasuredBudget
from speculation.messages import Draft, DraftFailure, Finished, GenerationRequest, OpenSession, Progress, StepReport
from speculation.ports import DraftLink
from speculation.tree import chain
from speculation.types import Plan, SamplingParams
from tour.chapter1_plain_decoding import CODE
from tour.chapter2_a_guess_checked import check_same
from tour.model import Model, console, open_model, say

LENGTH, NODES = 32, 16
PLAIN = Plan(strategy="autoregressive")
DRAFTED = Plan(strategy="suffix", sources=("suffix",), max_nodes=NODES)
LIES = {
    "sure and wrong": "random tokens, each with the claim that it is certain",
    "no tokens": "ids far beyond the vocabulary",
    "no trees": "nodes whose parents come after them",
    "other text": "guesses for a text that is not this one",
    "late": "guesses that come after 50 ms, when they are old",
    "nothing": "no answer at all",
}


class Liar(DrafterService):
    """The real drafter, except for what it says."""

    def __init__(self, lie: str) -> None:
        super().__init__(DrafterConfig())
        self._lie = lie
        self._random = random.Random(1)

    @override
    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:
        return await self._lied(await super().open(message))

    @override
    async def step(self, message: StepReport) -> Draft | DraftFailure | None:
        return await self._lied(await super().step(message))

    _longest_at_once_s = -1.0  # Lies take their time.

    async def _lied(self, draft: Draft | DraftFailure | None) -> Draft | DraftFailure | None:
        if not isinstance(draft, Draft):
            return draft
        sure = chain([self._random.randrange(49_000) for _ in range(NODES)], "suffix", [1.0] * NODES)
        match self._lie:
            case "no tokens":
                return replace(draft, tree=chain([2_000_000_000] * NODES, "suffix"))
            case "no trees":
                return replace(draft, tree=replace(sure, parents=tuple(range(1, NODES + 1))))
            case "other text":
                return replace(draft, tree=sure, base_hash=draft.base_hash ^ 1)
        await asyncio.sleep({"late": 0.05, "nothing": 3600}.get(self._lie, 0))
        return replace(draft, tree=sure)


@asynccontextmanager
async def decoding(model: Model, link: DraftLink, budget: Budget) -> AsyncIterator[DecodingLoop]:
    """The engine, with one drafter behind ``link``."""
    drafter = Origin(name="the drafter", link=link, trusted=False)
    loop = DecodingLoop(model.target, [drafter], budget, LoopConfig(), model.worker)
    await loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


async def ask(loop: DecodingLoop, prompt: Sequence[int], plan: Plan, sampling: SamplingParams) -> list[Progress]:
    """The steps of an answer. The engine sends every step's tokens as they come, and says once that it has finished."""
    request = GenerationRequest(request_id="tour", prompt=tuple(prompt), sampling=sampling, plan=plan)
    return [event async for event in loop.generate(request) if not isinstance(event, Finished)]


async def meet(model: Model, lie: str, plan: Plan, budget: Budget) -> list[int]:
    """The answer beside a drafter that lies."""
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.7, seed=3)
    async with decoding(model, InProcessDraftLink(Liar(lie)), budget) as loop:
        started = time.perf_counter()
        steps = await ask(loop, model.prompt(CODE), plan, sampling)
        milliseconds = 1000 * (time.perf_counter() - started) / LENGTH
    checked, right = sum(step.num_drafted for step in steps), sum(len(step.accepted_sources) for step in steps)
    console.print(f"  {len(steps)} passes, {milliseconds:.0f} ms per token; {checked} guesses checked, {right} right")
    return [token for step in steps for token in step.token_ids]


async def meet_the_liars(model: Model) -> None:
    everything = FixedBudget(max_nodes=NODES)  # It checks whatever comes.
    console.print("[bold]plain decoding[/bold]")
    plain = await meet(model, "nothing", PLAIN, everything)
    for lie, what in LIES.items():
        console.print(f"[bold]{lie}[/bold]: {what}")
        check_same(await meet(model, lie, DRAFTED, everything), plain)
    console.print("[bold]sure and wrong[/bold] again, under the budget of chapter 6")
    check_same(await meet(model, "sure and wrong", DRAFTED, MeasuredBudget(model.costs(), max_nodes=NODES)), plain)
    console.print(f"\nEach of these answers has the {LENGTH} tokens of plain decoding.")


def main() -> None:
    model = open_model()
    logging.disable(logging.WARNING)  # The engine logs drafts that it refuses. That is for operators.
    asyncio.run(meet_the_liars(model))
    logging.disable(logging.NOTSET)
    say("""
        Refused drafts never reach a pass. Where the budget decides, the engine also waits for drafts, and asks for them,
        only as far as that has paid before. So a liar costs time at first, and little later.

        [bold]Try[/bold] a liar of your own: one that is right for thirty tokens, and wrong from then on. How many passes
        does the budget take to notice? And can you write one that changes a token? Then please report it (SECURITY.md).
    """)


if __name__ == "__main__":
    main()
