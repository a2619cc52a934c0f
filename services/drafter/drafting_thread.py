"""A thread that drafts, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
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
        self._started = False

    def run(
        self, function: Callable[[Unpack[_Arguments]], _Result], *arguments: *_Arguments, later: bool = False
    ) -> asyncio.Future[_Result]:
        """Hand over a call; gives what it will return or raise.

        Args:
            later: when nothing else is left to do.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()

        def job() -> None:
            # Nobody waits any more. Other calls are made all the same: what a source is told must not be lost.
            if later and future.cancelled():
                return
            try:
                result = function(*arguments)
            except Exception as error:
                _tell(loop, _fail, future, error)
            except BaseException as error:
                # What would end this thread is not to end the event loop.
                _tell(loop, _fail, future, RuntimeError(f"drafting was ended by {error!r}"))
            else:
                _tell(loop, _fulfil, future, result)

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


def _fulfil(future: asyncio.Future[_Result], result: _Result) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[_Result], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
