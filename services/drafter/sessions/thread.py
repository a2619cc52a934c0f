"""A thread that drafts, so that drafting does not block the event loop.

Handing a call over and its result back takes about 0.3 ms on a busy machine. Calls that are known to be short therefore run
in the event loop itself, as long as the thread has nothing to do.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

_Job = Callable[[], None]

# Threads of torch for a model that drafts. A second one is worth less than it takes from a target on the same cores.
_OF_TORCH = 1
# Longest call that may run in the event loop itself.
_AT_ONCE_S = 0.001


class DraftingThread:
    """Runs calls one at a time, in the order in which they came; ``later`` calls when there are no others.

    Each result is delivered as soon as it is there. The thread starts with the first call, and ends when this object is
    garbage-collected.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # None wakes the thread for a call in ``_later``.
        self._now: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._later: deque[_Job] = deque()
        # Calls handed over that have not ended; used in the event loop only.
        self._open = 0
        self._started = False

    def takes(self, expected_s: float) -> bool:
        """Whether a call that takes so long may run in the event loop itself now."""
        return expected_s <= self.longest_at_once_s

    @property
    def longest_at_once_s(self) -> float:
        """Seconds of the longest call that may run in the event loop itself now; below 0: none may."""
        return -1.0 if self._open else _AT_ONCE_S

    def run(
        self,
        function: Callable[[Unpack[_Arguments]], _Result],
        *arguments: *_Arguments,
        later: bool = False,
        expected_s: float = math.inf,
    ) -> asyncio.Future[_Result]:
        """Hand over a call; returns a future of its result or exception.

        Args:
            later: run it only when no other call waits.
            expected_s: how long it is expected to take, in seconds.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        if self.takes(expected_s):
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
            except SystemExit as error:
                future.set_exception(_ended_by(error))
            return future

        def job() -> None:
            # Nobody waits any more. Calls other than ``later`` ones run all the same: a source must not miss an update.
            if later and future.cancelled():
                _tell(loop, ended)
                return
            try:
                result = function(*arguments)
            except Exception as error:
                _tell(loop, ended, _fail, future, error)
            except BaseException as error:
                # An exception that would end this thread must not end the event loop.
                _tell(loop, ended, _fail, future, _ended_by(error))
            else:
                _tell(loop, ended, _fulfil, future, result)

        # A job with a reference to this object would keep the thread alive.
        itself = weakref.ref(self)

        def ended(tell: Callable[..., None] | None = None, *what: object) -> None:
            if (thread := itself()) is not None:
                thread._open -= 1
            if tell is not None:
                tell(*what)

        self._open += 1
        if later:
            self._later.append(job)
            self._now.put(None)
        else:
            self._now.put(job)
        if not self._started:
            self._start()
        return future

    def _start(self) -> None:
        self._started = True
        # A daemon: a model that hangs must not keep the process from ending.
        threading.Thread(target=_work, args=(self._now, self._later), name=self._name, daemon=True).start()
        weakref.finalize(self, self._now.put, _end)


def _work(now: queue.SimpleQueue[_Job | None], later: deque[_Job]) -> None:
    while True:
        try:
            job = now.get(block=not later)
        except queue.Empty:
            job = later.popleft()
        if job is _end:
            return
        if job is not None:
            job()
        # Otherwise it would live, with all that it references, until the next job comes.
        del job


def _end() -> None:
    """The thread's last job: it ends the thread."""


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    # If the event loop has been closed meanwhile, nobody waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _ended_by(error: BaseException) -> Exception:
    return RuntimeError(f"drafting was ended by {error!r}")


def _fulfil(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[_Result], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def use_threads(count: int = _OF_TORCH) -> None:
    """Let torch use ``count`` threads for what the calling thread computes.

    ``torch.set_num_threads`` sets the calling thread's number, and the one that threads begin with. The latter is put back,
    so a target in this process keeps its threads. (Two teams of threads on the same cores slow each other down several
    times, so a small model beside a target does best alone.)
    """
    # Routers, and drafters without a model, start in half the time without it.
    import torch

    others = torch.get_num_threads()
    torch.set_num_threads(count)
    restoring = threading.Thread(target=torch.set_num_threads, args=(others,))
    restoring.start()
    restoring.join()
