"""The passes that are under way, oldest first, in the one thread that touches the target; and whether they come back."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple, Unpack

from services.verifier.engine.passes import Part, finish_pass, whole_pass
from services.verifier.engine.stats import StepTimes
from services.verifier.target_port import Target
from speculation.errors import TargetLost

log = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

# A pass that takes so many times as long as the longest of late hangs; and how fast that one is forgotten, per pass.
_TIMES_LONGEST = 20.0
_FORGOTTEN = 0.99


class PassHung(Exception):
    """A pass came back after it had been given up; what it brought is for nobody."""


class PassQueue:
    """Begins and finishes passes.

    Args:
        worker: the one thread that touches the target; ``stop`` shuts it down.
        deadline_s: no pass hangs before so many seconds.
        hung: called when a pass hangs, while it still does.

    Attributes:
        hanging: a pass has not come back in time.
        lost: nor in as much time again.
    """

    def __init__(
        self,
        target: Target,
        worker: Executor,
        times: StepTimes,
        *,
        deadline_s: float,
        hung: Callable[[], None],
    ) -> None:
        self.hanging = False
        self.lost = False
        self._target = target
        self._worker = worker
        self._times = times
        self._deadline_s = deadline_s
        self._hung = hung
        self._longest_s = 0.0
        self._under_way: deque[list[Part]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether every stage of the target has a pass."""
        return len(self._under_way) >= self._target.depth

    async def begin(self, parts: list[Part]) -> None:
        """Begin a pass; where there is one at a time, with its end: between the two the thread would only wait for this one.

        Raises:
            PassHung: it took too long.
        """
        _mark(parts, in_pass=True)
        if self._target.depth == 1:
            self._under_way.append(parts)
            return
        try:
            with self._times.measure("begin"):
                await self._watched(self._target.begin, [part.rows for part in parts])
        except PassHung:
            # It came back: the pass has begun.
            self._under_way.append(parts)
            raise
        except Exception:
            _mark(parts, in_pass=False)
            raise
        self._under_way.append(parts)

    async def finish(self, meanwhile: Callable[[], None]) -> tuple[list[Part], float]:
        """Finish the oldest pass, with what has come of it; and the seconds that the target took.

        Args:
            meanwhile: called while the pass runs.

        Raises:
            PassHung: it took too long.
        """
        parts = self._under_way.popleft()
        before = self._times.seconds.get("forward", 0.0)
        run = whole_pass if self._target.depth == 1 else finish_pass
        try:
            with self._times.measure("pass_and_verify"):
                await self._watched(run, self._target, parts, self._times, meanwhile=meanwhile)
        finally:
            _mark(parts, in_pass=False)
        return parts, self._times.seconds["forward"] - before

    async def abandon(self) -> None:
        """Finish what is under way, for nobody.

        Raises:
            TargetLost: the target is.
        """
        if self._target.depth == 1:
            self.drop()
        while self._under_way:
            _mark(self._under_way.popleft(), in_pass=False)
            try:
                await self._watched(self._target.finish)
            except TargetLost:
                raise
            except Exception:
                log.exception("a pass failed after another had")

    def drop(self) -> None:
        """Forget what is under way: the target has lost it, or never had it."""
        while self._under_way:
            _mark(self._under_way.popleft(), in_pass=False)

    async def recover(self) -> None:
        """Build the target anew.

        Raises:
            TargetLost: it is lost again.
        """
        await asyncio.get_running_loop().run_in_executor(self._worker, self._target.recover)

    async def stop(self) -> None:
        """End the thread; one that hangs is left behind."""
        if self.hanging:
            self._worker.shutdown(wait=False, cancel_futures=True)
        else:
            await asyncio.to_thread(self._worker.shutdown)

    async def _watched(
        self,
        function: Callable[[Unpack[_Arguments]], _Result],
        *arguments: *_Arguments,
        meanwhile: Callable[[], None] | None = None,
    ) -> _Result:
        """Run something in the target's thread. A pass that hangs cannot be stopped: it is waited for, but told of."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        work = loop.run_in_executor(self._worker, function, *arguments)
        if meanwhile is not None:
            meanwhile()
        deadline_s = max(self._deadline_s, _TIMES_LONGEST * self._longest_s)
        await asyncio.wait((work,), timeout=deadline_s)
        if work.done():
            self._longest_s = max(_FORGOTTEN * self._longest_s, loop.time() - began)
            return work.result()
        self.hanging = True
        log.error("a pass has not come back for %.1f s", deadline_s)
        self._hung()
        try:
            await asyncio.wait((work,), timeout=deadline_s)
            if not work.done():
                self.lost = True
                log.error("the pass has not come back for %.1f s: the target is given up", 2 * deadline_s)
                await asyncio.wait((work,))
        finally:
            self.hanging = not work.done()
        self.lost = False
        log.warning("the pass came back after %.1f s", loop.time() - began)
        if isinstance(error := work.exception(), TargetLost):
            raise error
        raise PassHung


def _mark(parts: list[Part], *, in_pass: bool) -> None:
    for part in parts:
        part.session.in_pass = in_pass
