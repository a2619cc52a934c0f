"""What one request's consumer reads: events in their order, for one reader in the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from speculation.messages import Finished, Progress

Event = Progress | Finished | BaseException


class Events:
    """A queue without bounds for a single reader. Every token passes through one, so it does no more than it must."""

    __slots__ = ("_loop", "_ready", "_waiting")

    def __init__(self) -> None:
        self._ready: deque[Event] = deque()
        self._waiting: asyncio.Future[None] | None = None
        # The reader's.
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, event: Event) -> None:
        """Add an event; a reader that waits is told by ``wake``."""
        self._ready.append(event)

    def wake(self) -> None:
        """Wake the reader, if there is something to read."""
        waiting = self._waiting
        if waiting is not None and self._ready and not waiting.done():
            waiting.set_result(None)

    def take(self) -> Event | None:
        """The next event, if there is one."""
        return self._ready.popleft() if self._ready else None

    def came(self) -> asyncio.Future[None]:
        """Ends once the reader is woken; for a reader that found nothing. Only in a running event loop."""
        if self._loop is None:
            # Only once: to find the running loop takes a call of the system.
            self._loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self._waiting = waiting
        return waiting
