"""Tokenises texts in a few threads, with a bound on the waiting ones. Callers that have gone are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from speculation.errors import ResourceExhausted

_Result = TypeVar("_Result")
_THREADS = 2
_MOST_WAITING = 256
_MOST_CHARACTERS = 32 << 20


@dataclass(slots=True)
class _Waiting:
    """Calls under way and waiting, and the characters of their texts."""

    texts: int = 0
    characters: int = 0

    def add(self, texts: int, characters: int) -> None:
        self.texts += texts
        self.characters += characters


class TokenisingPool:
    """A small pool of threads. What is cancelled before its turn is never begun.

    Tokenising a long text takes time; in a thread, it does not delay other requests. asyncio's own pool is shared with
    everything else and has no bound on what waits.

    Args:
        threads: texts tokenised at once; a tokeniser's work mostly runs without Python's lock.
        most_waiting: calls under way and waiting; those of one tenant may be half as many.
        most_characters: of their texts together; those of one tenant may have half as many.
    """

    def __init__(
        self, threads: int = _THREADS, most_waiting: int = _MOST_WAITING, most_characters: int = _MOST_CHARACTERS
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenising")
        self._most = _Waiting(most_waiting, most_characters)
        self._most_of_one = _Waiting(-(-most_waiting // 2), -(-most_characters // 2))
        self._all = _Waiting()
        self._of: dict[str, _Waiting] = {}

    async def run(self, work: Callable[[], _Result], characters: int, tenant: str | None = None) -> _Result:
        """The result of ``work`` on a text of so many characters.

        Args:
            tenant: whose text it is, so that nobody's texts keep those of all others out; None: not known.

        Raises:
            ResourceExhausted: too much is waiting already.
        """
        counts = [(self._all, self._most, "")]
        if tenant is not None:
            own = self._of.get(tenant) or _Waiting()
            counts.append((own, self._most_of_one, " of yours"))
        for waiting, most, whose in counts:
            # One text may be longer than the bound.
            if waiting.texts and (waiting.texts >= most.texts or waiting.characters + characters > most.characters):
                raise ResourceExhausted(f"{waiting.texts} texts{whose} wait to be tokenised already")
        if tenant is not None:
            self._of[tenant] = own
        for waiting, _, _ in counts:
            waiting.add(1, characters)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            for waiting, _, _ in counts:
                waiting.add(-1, -characters)
            if tenant is not None and not self._of[tenant].texts:
                del self._of[tenant]
