"""A simulated clock: passes and drafts take exactly as long as they are said to, on every machine, however busy."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from typing_extensions import override

from services.verifier.engine.finishing import finish_pass, whole_pass

_Result = TypeVar("_Result")


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    @override
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

    @override
    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """``asyncio.run`` on a ``JumpingLoop``."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)


class SimulatedWorker(Executor):
    """Simulates one worker thread: a call runs at the time at which it would end. ``pass_s()``: seconds of the next pass."""

    def __init__(self, pass_s: Callable[[], float]) -> None:
        self._pass_s = pass_s
        self._free_at = 0.0

    @override
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
