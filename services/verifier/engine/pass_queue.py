"""The queue of passes under way. Runs them in the target's thread and notices when one hangs."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, Unpack

from services.verifier.engine.clock import now
from services.verifier.engine.finishing import finish_pass, make_verdicts, whole_pass
from services.verifier.engine.passes import PassWork
from services.verifier.engine.stats import StepTimes
from services.verifier.model.target_port import Target
from speculation.errors import TargetLost

log = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

# A pass hangs if it takes this many times as long as the longest recent one, whose time decays by this factor per pass.
_TIMES_LONGEST = 20.0
_FORGOTTEN = 0.99
# It is overdue, which only health checks hear of, much earlier: after so many seconds, and times the longest recent one.
_OVERDUE_S, _TIMES_OVERDUE = 10.0, 5.0


class PassHung(Exception):
    """A hung pass has returned. Its requests have ended, so its result is dropped."""


class PassUnderWay(NamedTuple):
    """A pass that was begun.

    Attributes:
        waited_s: seconds that it waited for drafts before.
        begun_at: in seconds of the event loop's clock.
    """

    work: PassWork
    waited_s: float
    begun_at: float


class PassQueue:
    """Begins and finishes passes.

    Args:
        worker: a single thread, the only one that touches the target; ``stop`` shuts it down.
        deadline_s: seconds that a pass may take before it can count as hung.
        hung: called as soon as a pass counts as hung.

    Attributes:
        hanging: a pass has missed its deadline and has not returned.
        lost: it has not returned within twice its deadline either.
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
        self._under_way: deque[PassUnderWay] = deque()
        self._began: float | None = None
        self._changing = False

    @property
    def overdue(self) -> bool:
        """Whether a call of the target takes so long that it may never come back. It has not failed yet."""
        if self._began is None:
            return False
        return now() - self._began > max(_OVERDUE_S, _TIMES_OVERDUE * self._longest_s)

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether every pipeline stage has a pass."""
        return len(self._under_way) >= self._target.depth

    async def begin(self, work: PassWork, waited_s: float = 0.0) -> None:
        """Begin a pass. With a single stage, ``finish`` runs the whole pass instead, which saves a thread switch.

        Args:
            waited_s: seconds that it has waited for drafts.

        Raises:
            PassHung: it took too long.
        """
        _mark(work, in_pass=True)
        begun = PassUnderWay(work, waited_s, now())
        if self._target.depth == 1:
            self._under_way.append(begun)
            return
        try:
            with self._times.measure("begin"):
                await self._watched(self._target.begin, work.rows)
        except PassHung:
            # The call has returned, so the pass is under way.
            self._under_way.append(begun)
            raise
        except Exception:
            _mark(work, in_pass=False)
            raise
        self._under_way.append(begun)

    async def finish(self, meanwhile: Callable[[], None]) -> tuple[PassUnderWay, float]:
        """Finish the oldest pass and verify its trees. Returns it and the target's time in seconds.

        Args:
            meanwhile: called in the event loop while the pass runs.

        Raises:
            PassHung: it took too long.
        """
        begun = self._under_way.popleft()
        before = self._times.seconds.get("forward", 0.0)
        run = whole_pass if self._target.depth == 1 else finish_pass
        try:
            with self._times.measure("pass_and_verify"):
                await self._watched(run, self._target, begun.work, self._times, meanwhile=meanwhile)
        finally:
            _mark(begun.work, in_pass=False)
        make_verdicts(begun.work)
        return begun, self._times.seconds["forward"] - before

    async def abandon(self) -> None:
        """Finish all passes under way and drop their results.

        Raises:
            TargetLost: the target is lost.
        """
        if self._target.depth == 1:
            self.drop()
        while self._under_way:
            _mark(self._under_way.popleft().work, in_pass=False)
            try:
                await self._watched(self._target.finish)
            except TargetLost:
                raise
            except Exception:
                log.exception("another pass failed as well")

    def drop(self) -> None:
        """Forget all passes under way: the target has lost them, or has not begun them."""
        while self._under_way:
            _mark(self._under_way.popleft().work, in_pass=False)

    async def beat(self) -> None:
        """Make sure that all of the target answers, while no pass is under way; or nothing, while it is being changed.

        Raises:
            TargetLost: a part of it does not.
            PassHung: it answered too late.
        """
        if self._changing:
            # It would wait in the thread, and count as hung.
            return
        # What an answer takes says nothing of what passes take.
        longest_s = self._longest_s
        try:
            await self._watched(self._target.beat)
        finally:
            self._longest_s = longest_s

    async def change(self, change: Callable[[], None]) -> None:
        """Call what changes the target, while no pass is under way. However long it takes, nothing counts as hung."""
        self._changing = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, change)
        finally:
            self._changing = False

    async def recover(self) -> None:
        """Rebuild the target.

        Raises:
            TargetLost: it is lost again.
        """
        await asyncio.get_running_loop().run_in_executor(self._worker, self._target.recover)

    async def stop(self) -> None:
        """Shut the thread down; do not wait for it if a pass hangs."""
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
        """Run ``function`` in the target's thread. A hung call cannot be stopped: it is reported, and waited for.

        Args:
            meanwhile: called here while ``function`` runs.

        Raises:
            PassHung: it returned, but too late.
        """
        began = self._began = now()
        # Type checkers know no way to hand on arguments of any number to ``submit``.
        submit: Callable[..., Future[_Result]] = self._worker.submit
        work = submit(function, *arguments)
        if meanwhile is not None:
            meanwhile()
        deadline_s = max(self._deadline_s, _TIMES_LONGEST * self._longest_s)
        await self._back_within(work, deadline_s)
        if work.done():
            self._longest_s = max(_FORGOTTEN * self._longest_s, now() - began)
            return work.result()
        self.hanging = True
        log.error("a pass has hung for %.1f s", deadline_s)
        self._hung()
        try:
            await self._back_within(work, deadline_s)
            if not work.done():
                self.lost = True
                log.error("the pass has hung for %.1f s: the target is given up", 2 * deadline_s)
                await self._back_within(work, None)
        finally:
            self.hanging = not work.done()
        self.lost = False
        log.warning("the hung pass returned after %.1f s", now() - began)
        if isinstance(error := work.exception(), TargetLost):
            raise error
        raise PassHung

    async def _back_within(self, work: Future[Any], seconds: float | None) -> None:
        """Wait until a call is back, for so many seconds at most. Each pass is waited for: ``asyncio.wait`` takes longer."""
        event_loop = asyncio.get_running_loop()
        waiting = event_loop.create_future()

        def back(_: Future[Any]) -> None:
            # In the target's thread.
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(self._came_back, waiting)

        work.add_done_callback(back)
        timer = None if seconds is None else event_loop.call_later(seconds, _end, waiting)
        try:
            await waiting
        finally:
            if timer is not None:
                timer.cancel()

    def _came_back(self, waiting: asyncio.Future[None]) -> None:
        self._began = None
        _end(waiting)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _mark(work: PassWork, *, in_pass: bool) -> None:
    for request in work.requests:
        request.in_pass = in_pass
