"""The decoding loop on a simulated clock: passes and drafts take exactly as long as a test says."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.origins import Origin
from services.verifier.engine.passes import finish_pass, whole_pass
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.ports import DraftLink
from speculation.types import TokenTree
from tests import fakes
from tests.fakes import RandomDrafter, ToyTarget

# Seconds of a pass where a test names no other.
PASS_S = 0.005

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when there is nothing else to do."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """``asyncio.run`` on a ``JumpingLoop``."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)


def simulated(test: Callable[_Arguments, Coroutine[Any, Any, None]]) -> Callable[_Arguments, None]:
    """Run an asynchronous test on a ``JumpingLoop``: what it sees is the same on every machine, however busy."""

    @functools.wraps(test)
    def on_a_simulated_clock(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> None:
        run(test(*arguments, **keywords))

    return on_a_simulated_clock


class SimulatedWorker(Executor):
    """Simulates one worker thread: a call runs at the time at which it would end. ``pass_s()``: seconds of the next pass."""

    def __init__(self, pass_s: Callable[[], float]) -> None:
        self._pass_s = pass_s
        self._free_at = 0.0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        loop = asyncio.get_running_loop()
        done: Future[Any] = Future()
        self._free_at = max(self._free_at, loop.time()) + (self._pass_s() if function in (whole_pass, finish_pass) else 0.0)

        def end() -> None:
            try:
                done.set_result(function(*arguments, **keywords))
            except Exception as error:
                done.set_exception(error)

        loop.call_at(self._free_at, end)
        return done


class SimulatedBudget(MeasuredBudget):
    """Expects ``pass_s`` seconds of every pass, whatever it holds."""

    def __init__(self, pass_s: float, max_nodes: int = 6) -> None:
        table = CostTable(by_rows={1: pass_s}, per_request=0.0, per_key=0.0)
        super().__init__(table, max_nodes=max_nodes)

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        super().learn(load, self.seconds(load), outcomes)

    def learn_prompts(self, load: Load, seconds: float) -> None:
        pass


class SlowDrafter(RandomDrafter):
    """Takes ``seconds()`` seconds for each draft."""

    def __init__(self, seconds: Callable[[], float], mood: str = "good") -> None:
        super().__init__(mood=mood)
        self.seconds = seconds

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
