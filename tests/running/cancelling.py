"""Cancels a coroutine at each of its waits in turn: what it leaves behind must not depend on where that was.

A wait is cancelled in one of these ways: "waiting": while what it waits for has not come; "come": when it has just come, and
the coroutine has not gone on; "twice": also at the next wait, such as one of a ``finally``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Literal

How = Literal["waiting", "come", "twice"]
WAYS: tuple[How, ...] = ("waiting", "come", "twice")
_MOST_WAITS, _MOST_TURNS = 500, 100


class _Counted:
    """Awaits a coroutine, and cancels the task that does at the wait with the number ``at``, counted from 0."""

    def __init__(self, work: Coroutine[Any, Any, object], at: int, how: How) -> None:
        self._work = work
        self._at = {at, at + 1} if how == "twice" else {at}
        self._how = how
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, object]:
        waiting = self._work.__await__()
        error: BaseException | None = None
        while True:
            try:
                waited = waiting.send(None) if error is None else waiting.throw(error)
            except StopIteration as ended:
                return ended.value
            if self.waits in self._at:
                self._cancel(waited)
            self.waits += 1
            try:
                yield waited
                error = None
            except BaseException as found:
                error = found

    def _cancel(self, waited: asyncio.Future[object] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._how == "come" and waited is not None:
            # Called before the task is told that what it waits for is there.
            waited.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


async def cancelled_at(work: Coroutine[Any, Any, object], at: int, how: How) -> bool:
    """Run ``work`` in a task of its own that is cancelled at a wait. Returns whether there was such a wait."""
    counted = _Counted(work, at, how)

    async def run() -> object:
        return await counted

    await asyncio.wait([task := asyncio.create_task(run())])
    if not task.cancelled():
        # Unless it fails for another reason.
        task.result()
    return counted.waits > at


async def at_every_wait(
    work: Callable[[], Coroutine[Any, Any, object]], after: Callable[[], Awaitable[object]], ways: tuple[How, ...] = WAYS
) -> int:
    """Run ``work`` again and again, cancelled at its first wait, its second one, and so on, until it ends by itself.

    Args:
        after: checks, behind each run, what it left.

    Returns:
        In how many places it was cancelled.
    """
    places = 0
    for how in ways:
        for at in range(_MOST_WAITS):
            reached = await cancelled_at(work(), at, how)
            try:
                await after()
            except (AssertionError, TimeoutError) as error:
                error.add_note(f"cancelled at its wait {at}, {how}")
                raise
            places += reached
            if not reached:
                break
        else:
            raise AssertionError(f"it has more than {_MOST_WAITS} waits")
    return places


async def at_every_turn(
    work: Callable[[], Coroutine[Any, Any, object]], after: Callable[[], Awaitable[object]], again: tuple[int, ...] = (0,)
) -> int:
    """Run ``work`` again and again, cancelled after one turn of the event loop, after two, and so on, until it ends first.

    Unlike its waits, the turns are also those of the tasks that it waits for. A thread may take any number of them.

    Args:
        after: checks, behind each run, what it left.
        again: after so many further turns it is cancelled once more.

    Returns:
        In how many places it was cancelled.
    """
    places = 0
    for later in again:
        for turns in range(_MOST_TURNS):
            task = asyncio.create_task(work())
            for number in range(turns + later + 1):
                if number >= turns:
                    task.cancel()
                await asyncio.sleep(0)
            await asyncio.wait([task])
            ended = not task.cancelled()
            if ended:
                task.result()
            try:
                await after()
            except (AssertionError, TimeoutError) as error:
                error.add_note(f"cancelled after {turns} turns of the event loop, and {later} later")
                raise
            places += not ended
            if ended:
                break
    return places
