"""What a router asked for ends with the router."""

from __future__ import annotations

import asyncio

import pytest

from cluster.ray.calling_routers import SILENCE_S, CallingRouters
from speculation.errors import Unavailable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_streams_of_a_silent_router_end_and_others_go_on() -> None:
    clock = Clock()
    callers = CallingRouters(clock)
    ended = []

    async def answer(caller: str) -> None:
        try:
            with callers.answering(caller):
                await asyncio.Event().wait()
        finally:
            ended.append(caller)

    dead, living = asyncio.create_task(answer("dead")), asyncio.create_task(answer("living"))
    await asyncio.sleep(0)
    clock.now = SILENCE_S - 1
    callers.heard("living")
    callers.end_silent()
    await asyncio.sleep(0)
    assert ended == []
    clock.now = SILENCE_S
    callers.end_silent()
    with pytest.raises(Unavailable, match="silent"):
        await dead
    assert ended == ["dead"]
    # A call that is cancelled by its own caller stays cancelled.
    living.cancel()
    with pytest.raises(asyncio.CancelledError):
        await living
