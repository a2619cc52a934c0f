"""Tokenises texts in a few threads; further ones wait, each tenant's in their order. Callers that have gone are skipped.

How many may wait is the servers' to say (``server.max_concurrent_requests``): they hold the texts already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

_Result = TypeVar("_Result")
_THREADS = 2


@dataclass(slots=True)
class _Tenant:
    """Who waits, with the characters of each one's text; and those of the texts that had their turn meanwhile."""

    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)
    taken: int = 0


class TokenisingPool:
    """A small pool of threads. What is cancelled before its turn is never begun.

    Tokenising a long text takes time; in a thread, it does not delay other requests. While texts wait, the next one is that
    of the tenant that has had the fewest characters, so that nobody's texts keep those of others out.

    Args:
        threads: texts tokenised at once; a tokeniser's work mostly runs without Python's lock.
    """

    def __init__(self, threads: int = _THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenising")
        self._free = threads
        self._of: dict[str, _Tenant] = {}

    async def run(self, work: Callable[[], _Result], characters: int, tenant: str | None = None) -> _Result:
        """The result of ``work`` on a text of so many characters.

        Args:
            tenant: whose text it is; None: not known.
        """
        await self._turn(tenant or "", characters)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._pass_on()

    async def _turn(self, tenant: str, characters: int) -> None:
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        known = self._of.get(tenant)
        if known is None:
            # One that comes now has had as much as the one that has had least.
            known = self._of[tenant] = _Tenant(taken=min((each.taken for each in self._of.values()), default=0))
        known.waiting.append((mine, characters))
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a turn that has ended to the next one who waits."""
        while self._of:
            tenant, state = min(self._of.items(), key=lambda item: item[1].taken)
            mine, characters = state.waiting.popleft()
            if not state.waiting:
                del self._of[tenant]
            if not mine.done():
                state.taken += characters
                mine.set_result(None)
                return
        self._free += 1
