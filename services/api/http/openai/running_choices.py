"""Runs the generations of a body's choices side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from services.access.gate import Visit
from services.api.messages import ClientRequest, Completion, RouterPort, TextChunk
from speculation.errors import Internal, OutriderError

Event = TextChunk | Completion
Admit = Callable[[ClientRequest], AbstractAsyncContextManager[Visit]]

# Events of a request that may wait for a slow reader before its generations wait, too.
_AHEAD = 64


class RunningChoices:
    """The generations of a request's choices, during a block. Leaving it cancels those that go on.

    Args:
        admit: holds a slot for a generation; raises where there is none.
    """

    def __init__(self, router: RouterPort, requests: Sequence[ClientRequest], admit: Admit) -> None:
        self._router = router
        self._requests = requests
        self._admit = admit
        self._events: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue(_AHEAD)
        self._left = len(requests)
        self._failure: OutriderError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RunningChoices:
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._requests))]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return self._left == 0

    async def next(self, within_s: float | None = None) -> tuple[int, Event] | None:
        """The next event of any choice, with the choice's index; None: there was none in time.

        Raises:
            OutriderError: a generation has failed; the others are of no use then.
        """
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(within_s):
                index, event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        self._left -= isinstance(event, Completion)
        return index, event

    def fail(self, error: OutriderError) -> None:
        """Have ``next`` raise an error."""
        self._failure = error
        with suppress(asyncio.QueueFull):
            self._events.put_nowait((0, error))

    async def _run(self, index: int) -> None:
        try:
            async with self._admit(self._requests[index]) as visit:
                await self._follow(index, visit)
        except Exception as error:
            await self._events.put((index, error))

    async def _follow(self, index: int, visit: Visit) -> None:
        events: AsyncGenerator[Event, None] = self._router.generate(visit.request)
        try:
            async for event in events:
                visit.note(event)
                await self._events.put((index, event))
                if isinstance(event, Completion):
                    return
        finally:
            await events.aclose()
        raise Internal("the router ended without a result")
