"""Ends the requests of a router that has died. Ray Serve would go on with streams that nobody reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from speculation.errors import Unavailable

log = logging.getLogger(__name__)

# How often a router with open streams says that it lives, and after how long a silence it counts as dead.
BEAT_S = 2.0
SILENCE_S = 15.0


class CallingRouters:
    """The routers that a verifier works for, and the tasks that answer them.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._tasks: dict[asyncio.Task[object], str] = {}

    def heard(self, caller: str) -> None:
        """Note that ``caller`` lives."""
        self._heard[caller] = self._clock()

    @contextmanager
    def answering(self, caller: str) -> Iterator[None]:
        """While the current task answers ``caller`` in the block, its silence ends the task.

        Raises:
            Unavailable: it was silent for too long. If it lives after all, it sends the request elsewhere.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("answering a caller needs a task")
        self.heard(caller)
        self._tasks[task] = caller
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._tasks:
                raise Unavailable(f"the router has been silent for {SILENCE_S:g} s") from None
            raise
        finally:
            self._tasks.pop(task, None)

    def end_silent(self) -> None:
        """Cancel the tasks that answer callers which have been silent for too long."""
        now = self._clock()
        silent = {caller for caller, at in self._heard.items() if now - at >= SILENCE_S}
        for task, caller in list(self._tasks.items()):
            if caller in silent:
                del self._tasks[task]
                task.cancel()
        for caller in silent:
            del self._heard[caller]
            log.info("the router %s is silent; its requests are ended", caller)

    async def watch(self) -> None:
        """Look for silent callers, for ever."""
        while True:
            await asyncio.sleep(BEAT_S)
            self.end_silent()
