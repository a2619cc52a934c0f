"""A thread that drafts, so that the event loop goes on meanwhile.

To hand a call over and its result back takes some 0.3 ms on a busy machine. What is known to take less than a loop may be
held up for is done in the event loop itself, as long as the thread has nothing to do.
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

# The event loop may be held up for so long by one call.
_AT_ONCE_S = 0.001


class DraftingThread:
    """Runs what it is handed, one after the other in the order in which it came.

    What has piled up costs no further waking, and each result leaves when it is there. It starts with the first call and
    ends when nobody can hand it any more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # None says that there is something in ``_later``.
        self._now: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._later: deque[_Job] = deque()
        # Calls handed over that have not ended; known to the event loop alone.
        self._open = 0
        self._started = False

    def run(
        self,
        function: Callable[[Unpack[_Arguments]], _Result],
        *arguments: *_Arguments,
        later: bool = False,
        expected_s: float = math.inf,
    ) -> asyncio.Future[_Result]:
        """Hand over a call; gives what it will return or raise.

        Args:
            later: when nothing else is left to do.
            expected_s: how long it takes, as far as anybody knows.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        if not self._open and expected_s <= _AT_ONCE_S:
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
            except SystemExit as error:
                future.set_exception(_ended_by(error))
            return future

        def job() -> None:
            # Nobody waits any more. Other calls are made all the same: what a source is told must not be lost.
            if later and future.cancelled():
                _tell(loop, ended)
                return
            try:
                result = function(*arguments)
            except Exception as error:
                _tell(loop, ended, _fail, future, error)
            except BaseException as error:
                # What would end this thread is not to end the event loop.
                _tell(loop, ended, _fail, future, _ended_by(error))
            else:
                _tell(loop, ended, _fulfil, future, result)

        # A job that knew this object would keep its thread alive.
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
        # A daemon: a model that hangs must not hold up a process that wants to end.
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
        # Or it would live, with all that it knows of, until the next one comes.
        del job


def _end() -> None:
    """Handed over when nobody can hand over anything any more."""


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    # A loop that has been closed meanwhile has nobody who waits.
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
