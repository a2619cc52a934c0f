"""The thread in which a drafter's text sources draft, without a thread."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

from typing_extensions import override

from services.drafter.sessions.thread import DraftingThread

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class SimulatedThread(DraftingThread):
    """As ``DraftingThread``: one call at a time, in their order, and ``later`` ones when there are no others.

    Args:
        seconds: gives how long the next call takes.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__("simulated")
        self._seconds = seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._idle: deque[Callable[[], None]] = deque()
        self._working = False

    @override
    def run(
        self,
        function: Callable[[Unpack[_Arguments]], _Result],
        *arguments: *_Arguments,
        later: bool = False,
        expected_s: float = math.inf,
    ) -> asyncio.Future[_Result]:
        if self.takes(expected_s):
            return super().run(function, *arguments, expected_s=expected_s)
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()

        def job() -> None:
            if later and future.cancelled():
                return
            try:
                result = function(*arguments)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self._open += 1
        (self._idle if later else self._calls).append(job)
        if not self._working:
            self._next()
        return future

    def _next(self) -> None:
        self._working = bool(self._calls or self._idle)
        if self._working:
            asyncio.get_running_loop().call_later(self._seconds(), self._work)

    def _work(self) -> None:
        job = (self._calls or self._idle).popleft()
        job()
        self._open -= 1
        self._next()
