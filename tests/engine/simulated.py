"""The decoding loop on a simulated clock: passes and drafts take exactly as long as a test says."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

from typing_extensions import override

from lab.regret.simulated_clock import JumpingLoop, SimulatedWorker, run
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.origins import Origin
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.ports import DraftLink
from speculation.types import TokenTree
from tests.engine import fakes
from tests.engine.fakes import RandomDrafter, ToyTarget

__all__ = ["JumpingLoop", "SimulatedWorker", "run"]

# Seconds of a pass where a test names no other.
PASS_S = 0.005

_Arguments = ParamSpec("_Arguments")


def simulated(test: Callable[_Arguments, Coroutine[Any, Any, None]]) -> Callable[_Arguments, None]:
    """Run an asynchronous test on a ``JumpingLoop``: what it sees is the same on every machine, however busy."""

    @functools.wraps(test)
    def on_a_simulated_clock(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
        run(test(*arguments, **keywords))

    return on_a_simulated_clock


class SimulatedBudget(MeasuredBudget):
    """Expects ``pass_s`` seconds of every pass, whatever it holds."""

    def __init__(self, pass_s: float, max_nodes: int = 6) -> None:
        table = CostTable(by_rows={1: pass_s}, per_request=0.0, per_key=0.0)
        super().__init__(table, max_nodes=max_nodes)

    @override
    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        super().learn(load, self.seconds(load), outcomes)

    @override
    def learn_prompts(self, load: Load, seconds: float) -> None:
        pass


class SlowDrafter(RandomDrafter):
    """Takes ``seconds()`` seconds for each draft."""

    def __init__(self, seconds: Callable[[], float], mood: str = "good") -> None:
        super().__init__(mood=mood)
        self.seconds = seconds

    @override
    async def _draft(self, session_id: str, max_nodes: int):  # type: ignore[no-untyped-def]
        if max_nodes:
            await asyncio.sleep(self.seconds())
        return await super()._draft(session_id, max_nodes)


@asynccontextmanager
async def decoding(
    target: ToyTarget, *links: DraftLink | Origin, pass_s: float = PASS_S, **options: Any
) -> AsyncIterator[DecodingLoop]:
    """As ``fakes.decoding``, in a ``JumpingLoop``: each pass takes ``pass_s`` seconds."""
    async with fakes.decoding(target, *links, worker=SimulatedWorker(lambda: pass_s), **options) as loop:
        yield loop
