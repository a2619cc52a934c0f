"""Where texts are tokenised: in a few threads, for callers that still wait, within a bound on what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from speculation.errors import ResourceExhausted

_Result = TypeVar("_Result")
_THREADS = 2
_MOST_WAITING = 256
_MOST_CHARACTERS = 32 << 20


class TokenisingPool:
    """A small pool of threads. What is cancelled before its turn is never begun.

    Tokenising a long text takes time; in a thread, it does not delay other requests. asyncio's own pool is shared with
    everything else and has no bound on what waits.

    Args:
        threads: texts tokenised at once; a tokeniser's work mostly runs without Python's lock.
        most_waiting: calls under way and waiting.
        most_characters: of their texts together.
    """

    def __init__(
        self, threads: int = _THREADS, most_waiting: int = _MOST_WAITING, most_characters: int = _MOST_CHARACTERS
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenising")
        self._most_waiting, self._most_characters = most_waiting, most_characters
        self._waiting = self._characters = 0

    async def run(self, work: Callable[[], _Result], characters: int) -> _Result:
        """The result of ``work`` on a text of so many characters.

        Raises:
            ResourceExhausted: too much is waiting already.
        """
        # One text may be longer than the bound.
        if self._waiting and (self._waiting >= self._most_waiting or self._characters + characters > self._most_characters):
            raise ResourceExhausted(f"{self._waiting} texts wait to be tokenised already")
        self._waiting += 1
        self._characters += characters
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1
            self._characters -= characters
