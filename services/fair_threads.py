"""Threads for work on requests, which takes turns. Further work waits, each tenant's in order, and is skipped if its caller
has gone.

Texts are tokenised so, and grammars compiled. Callers bound how much may wait (``server.max_concurrent_requests``), since
they hold the texts and grammars already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from services.abandoned import may_be_left
from speculation.errors import NotBegun, ResourceExhausted

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Tenant:
    """Who waits, with the size of each one's work; how much of its work has a thread, and what it has had so far."""

    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)
    running: int = 0
    taken: int = 0


class FairThreads:
    """A small pool of threads. What is cancelled before its turn is never begun.

    Work on a long text takes time; in a thread, it does not delay other requests. What has begun cannot be stopped, so no
    tenant has the last thread: one is always left to the others. While work waits, the next is that of the tenant that has
    had the least, so that nobody's keeps that of others out.

    Args:
        name: of the threads.
        threads: pieces of work at once, at most one fewer of one tenant (of a single thread: that one).
    """

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._stopped = False
        self._free = threads
        self._most_of_one = max(1, threads - 1)
        # Who has work here, running or waiting.
        self._of: dict[str, _Tenant] = {}

    async def run(self, work: Callable[[], _Result], size: int, tenant: str | None = None) -> _Result:
        """The result of ``work``.

        Args:
            size: how much it is beside other work here, such as the characters of a text.
            tenant: whose it is; None: not known.

        Raises:
            ResourceExhausted: the machine has no thread for it.
            NotBegun: the threads were stopped before its turn.
        """
        name = tenant or ""
        await self._turn(name, size)
        try:
            running = may_be_left(asyncio.get_running_loop().run_in_executor(self._threads, work))
        except RuntimeError as error:
            # Its turn goes on to the next one, or all would wait for ever once this had happened often enough.
            self._end(name)
            if self._stopped:
                raise NotBegun("it is being stopped") from error
            raise ResourceExhausted(f"no thread can be started ({error}); try again") from error
        # Also of a caller that has gone: its thread is taken until the work ends.
        running.add_done_callback(lambda _: self._end(name))
        return await asyncio.shield(running)

    def stop(self) -> None:
        """End the threads; what they have begun goes on to its end."""
        self._stopped = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, name: str, size: int) -> None:
        known = self._of.get(name)
        if known is None:
            # One that comes now has had as much as the one that has had least.
            known = self._of[name] = _Tenant(taken=min((each.taken for each in self._of.values()), default=0))
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        known.waiting.append((mine, size))
        self._pass_on()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._end(name)
            else:
                self._leave(name)
            raise

    def _pass_on(self) -> None:
        """Give free threads to those who wait and may have one."""
        while self._free:
            may = [each for each in self._of.values() if each.waiting and each.running < self._most_of_one]
            if not may:
                return
            state = min(may, key=lambda each: each.taken)
            mine, size = state.waiting.popleft()
            if not mine.done():
                self._free -= 1
                state.running += 1
                state.taken += size
                mine.set_result(None)

    def _end(self, name: str) -> None:
        """Work that had a thread needs it no more."""
        self._free += 1
        self._of[name].running -= 1
        self._pass_on()
        self._leave(name)

    def _leave(self, name: str) -> None:
        """Forget a tenant of whom nothing is here any more."""
        state = self._of.get(name)
        if state is None:
            return
        while state.waiting and state.waiting[0][0].done():
            state.waiting.popleft()
        if not state.running and not state.waiting:
            del self._of[name]
