"""An event loop for many simulated processes: a virtual clock, no sockets, no threads, and an order drawn from a seed.

asyncio promises that the callbacks of one loop run in the order in which they were scheduled. So they do here within one
process. Whose callback runs next is drawn: between processes nothing promises an order.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class Deadlock(Exception):
    """Nothing will ever happen again, and somebody waits."""


class Endless(Exception):
    """More callbacks have run than a schedule can need: something goes round in circles."""


class _Handle:
    """What asyncio's ``Handle`` and ``TimerHandle`` are used for, and as little more as possible: there are many."""

    __slots__ = ("args", "callback", "context", "gone")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self.callback, self.args, self.context, self.gone = callback, args, context, False

    def cancel(self) -> None:
        self.gone = True

    def cancelled(self) -> bool:
        return self.gone


class Process:
    """A simulated process: it can be stopped for a while, or killed, after which nothing of it runs any more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.frozen = False
        self.ready: deque[_Handle] = deque()
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    def __repr__(self) -> str:
        return self.name


_PROCESS: ContextVar[Process | None] = ContextVar("simulated process", default=None)


def current_process() -> Process:
    """The process whose callback runs."""
    process = _PROCESS.get()
    assert process is not None, "outside of all processes"
    return process


class Takes(Protocol):
    """An executor whose calls take a time of their own, one after the other."""

    def seconds(self) -> float:
        """Of the next call."""


# Calls in threads of which no test says how long they take: tokenising, compiling, looking something up.
_CALL_S = 0.0004
_MOST_CALLBACKS = 400_000


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs processes on a clock that jumps to the next timer when nobody has anything to do.

    What is handed to an executor runs in this thread, at the virtual time at which it would have ended. Nothing of a process
    that was killed runs, not even ``finally``: that is what distinguishes kill -9 from an error.

    Attributes:
        outside: the process of users and of the simulation itself.
        blocked_s: what is called in an executor adds to this the seconds for which it would have blocked.
        errors: what asyncio's exception handler was told.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._order = random.Random(seed)
        self._now = 0.0
        self._sequence = 0
        self._timers: list[tuple[float, int, _Handle]] = []
        self._runnable: list[Process] = []
        self._busy_until: dict[int, float] = {}
        self._graveyard: list[Any] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self.outside = Process("outside")
        self.blocked_s = 0.0
        self.errors: list[str] = []
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now

    def start(self, process: Process, coroutine: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Run a coroutine in a process."""
        return self.create_task(coroutine, context=process.context.copy())

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        return task

    def _asyncgen_firstiter_hook(self, _generator: object) -> None:
        """Nobody shuts generators down at the end of a run, so none is kept count of."""

    def bury(self) -> None:
        """End a run: what still waits is given up, and nobody is told of it."""
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        # One by one: of a heap of garbage, Python would find out at length what hangs together.
        for task in [task for task in self._tasks if not task.done()]:
            with suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        self._tasks.clear()
        self._timers.clear()
        self._graveyard.clear()

    def kill(self, process: Process) -> None:
        """End a process: nothing of it ever runs again."""
        process.dead = True
        self._graveyard.append(process)
        if process in self._runnable:
            self._runnable.remove(process)

    def freeze(self, process: Process, frozen: bool) -> None:
        """Stop a process, or let it go on."""
        if process.dead or process.frozen == frozen:
            return
        process.frozen = frozen
        if process.ready:
            (self._runnable.remove if frozen else self._runnable.append)(process)

    # --- asyncio's side -----------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = _Handle(callback, args, copy_context() if context is None else context)
        self._ready_now(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        timer = _Handle(callback, args, copy_context() if context is None else context)
        self._sequence += 1
        heappush(self._timers, (when, self._sequence, timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | Takes | None,
        func: Callable[[Unpack[_Arguments]], _Result],
        *args: *_Arguments,
    ) -> asyncio.Future[_Result]:
        future: asyncio.Future[_Result] = self.create_future()
        begin = self._now
        if executor is None or not hasattr(executor, "seconds"):
            end = begin + self._order.random() * _CALL_S
        else:
            end = max(begin, self._busy_until.get(id(executor), 0.0)) + executor.seconds()
            self._busy_until[id(executor)] = end

        def run() -> None:
            if future.cancelled():
                return
            self.blocked_s = 0.0
            try:
                result = func(*args)
            except Exception as error:
                if self.blocked_s:
                    self.call_later(self.blocked_s, _fail, future, error)
                else:
                    future.set_exception(error)
            else:
                if self.blocked_s:
                    self.call_later(self.blocked_s, _fulfil, future, result)
                else:
                    future.set_result(result)

        self.call_at(end, run)
        return future

    def _ready_now(self, handle: _Handle) -> None:
        process = handle.context.get(_PROCESS) or self.outside
        if process.dead:
            self._graveyard.append(handle)
            return
        ready = process.ready
        if not ready and not process.frozen:
            self._runnable.append(process)
        ready.append(handle)

    def _run_once(self) -> None:
        """Called in a loop by asyncio: run what there is until somebody stops the loop."""
        runnable, drawn, ran = self._runnable, self._order.random, 0
        while not self._stopping:  # type: ignore[attr-defined]
            if not runnable:
                self._jump()
                continue
            at = int(drawn() * len(runnable)) if len(runnable) > 1 else 0
            process = runnable[at]
            handle = process.ready.popleft()
            if not process.ready:
                del runnable[at]
            if handle.gone:
                continue
            ran += 1
            if ran > _MOST_CALLBACKS:
                raise Endless(f"{ran} callbacks until second {self._now:.1f}")
            try:
                handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.errors.append(f"{handle.callback} failed: {error!r}")

    def _jump(self) -> None:
        """To the next timer, and to all others of the same time."""
        timers = self._timers
        while timers:
            when, _, timer = heappop(timers)
            if timer.gone:
                continue
            self._now = max(self._now, when)
            self._ready_now(timer)
            while timers and timers[0][0] <= self._now:
                later = heappop(timers)[2]
                if not later.gone:
                    self._ready_now(later)
            return
        raise Deadlock(f"nothing will ever happen after second {self._now:.1f}")

    def _note(self, _loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context['message']}: {error!r}")


def _fulfil(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
