"""Users who stream while something breaks, and what they see of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

import outrider
from tests.chaos.cells import ASKED, Plan, options
from tests.chaos.history import AFTERWARDS, DONE, FAILED, FAULT, HEALED, TOKENS, History, Record

STREAM_S = 90.0
# A request that comes after the fault must be answered within this time.
RECOVERY_S = 180.0


class Arrangement(Protocol):
    """Components that serve, and that can be broken."""

    @property
    def place(self) -> str:
        """Its name in plans."""

    @property
    def address(self) -> str:
        """Where it answers; it may change while a fault is mended."""

    async def fail(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        """Break what the plan says, wait, and mend it."""


async def run_plan(arrangement: Arrangement, plan: Plan, expected: Mapping[str, tuple[int, ...]]) -> Record:
    """Let users stream, break something, mend it, and see that requests are answered again."""
    history = History()
    begin, ended = asyncio.Event(), asyncio.Event()

    async def watch(client: outrider.AsyncClient, name: str) -> None:
        shown = 0
        try:
            async with client.stream(**options(name), timeout_s=STREAM_S) as stream:
                async for chunk in stream:
                    history.add(TOKENS, name, chunk.token_ids)
                    shown += len(chunk.token_ids)
                    if plan.after and shown >= plan.after:
                        begin.set()
            history.add(DONE, name)
        except outrider.OutriderError as error:
            history.add(FAILED, name, text=f"{type(error).__name__}: {error}")
        begin.set()

    async with outrider.AsyncClient(arrangement.address, retry=outrider.Retry(attempts=1)) as client:
        users = [asyncio.create_task(watch(client, name)) for name in ASKED]
        if not plan.after:
            begin.set()
        await begin.wait()
        history.add(FAULT, text=str(plan.cell))
        mending = asyncio.create_task(arrangement.fail(plan, ended))
        newcomer = asyncio.create_task(_until_answered(arrangement, history))
        await asyncio.gather(*users)
        ended.set()
        await mending
        history.add(HEALED)
        await newcomer
    return Record(plan, {**expected, AFTERWARDS: expected["greedy"]}, history.events)


async def _until_answered(arrangement: Arrangement, history: History) -> None:
    """Ask anew, each time as a new client, until a request is answered."""
    since = time.monotonic()
    while True:
        try:
            async with outrider.AsyncClient(arrangement.address, retry=outrider.Retry(attempts=1)) as client:
                answer = await client.generate(**options("greedy"), timeout_s=10.0)
            history.add(TOKENS, AFTERWARDS, answer.token_ids)
            history.add(DONE, AFTERWARDS)
            return
        except outrider.OutriderError as error:
            if time.monotonic() - since > RECOVERY_S:
                history.add(FAILED, AFTERWARDS, text=str(error))
                return
            await asyncio.sleep(0.2)
