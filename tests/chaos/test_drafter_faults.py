"""A drafter in a process of its own that is killed, frozen or replaced in mid-request: no token changes, no step waits long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.links.grpc_draft import GrpcDraftLink
from services.links.in_process import InProcessDraftLink
from services.verifier.engine.loop import DecodingLoop
from tests.drafters.drafter_process import DrafterProcess
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, decoding, request
from tests.running.patience import PATIENCE_S, until

_DRAFTER = """
import asyncio
from services.links.grpc_draft import serve_drafter
from tests.engine.fakes import RandomDrafter

async def main():
    server, port = await serve_drafter(RandomDrafter(mood="good"), "127.0.0.1:0", "a shared secret")
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""
DEADLINE_S = 0.05


@asynccontextmanager
async def under_way(tokens: int) -> AsyncIterator[tuple[DrafterProcess, DecodingLoop, asyncio.Task[list[int]]]]:
    """A request that decodes with the help of a drafter process, and already has been for some steps."""
    drafter, target = DrafterProcess(_DRAFTER), ToyTarget()
    target.delay_s = 0.005
    await drafter.start()
    link = GrpcDraftLink(drafter.address, "a shared secret")
    async with decoding(target, link, draft_deadline_s=DEADLINE_S) as loop:
        await until(lambda: link.connected)

        async def run() -> list[int]:
            return (await collect(loop, wanted(tokens)))[0]

        task = asyncio.create_task(run())
        async with asyncio.timeout(PATIENCE_S):
            while loop.stats.drafts_used < 5:
                await asyncio.sleep(0.005)
                if task.done():
                    task = asyncio.create_task(run())
        try:
            yield drafter, loop, task
        finally:
            drafter.end()


def wanted(tokens: int):  # type: ignore[no-untyped-def]
    return request("r", [1, 2, 3], max_tokens=tokens, ignore_eos=True)


async def plain(tokens: int) -> list[int]:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as loop:
        return (await collect(loop, request("r", [1, 2, 3], PLAIN, max_tokens=tokens, ignore_eos=True)))[0]


async def until_used(loop: DecodingLoop, task: asyncio.Task[list[int]], used: int, tokens: int) -> None:
    """Answer, ``task`` first, until more than ``used`` drafts have been used: every answer is plain decoding's."""
    expected = await plain(tokens)
    assert await task == expected
    async with asyncio.timeout(PATIENCE_S):
        while loop.stats.drafts_used <= used:
            assert (await collect(loop, wanted(tokens)))[0] == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_who_is_gone_is_not_waited_for(number: signal.Signals) -> None:
    async with under_way(400) as (drafter, loop, task):
        waits = loop.stats.times.seconds["draft_wait"]
        steps = loop.stats.times.steps
        drafter.signal(number)
        expected = await plain(400)
        assert await task == expected
        while loop.stats.times.steps - steps < 300:
            assert (await collect(loop, wanted(400)))[0] == expected
        waited, steps = loop.stats.times.seconds["draft_wait"] - waits, loop.stats.times.steps - steps
        # A few steps of a request wait to the deadline, then one in thirty-two: never each of them.
        assert waited < DEADLINE_S * steps / 4


@pytest.mark.exhaustive
async def test_frozen_and_thawed_is_used_again() -> None:
    async with under_way(450) as (drafter, loop, task):
        drafter.signal(signal.SIGSTOP)
        used = loop.stats.drafts_used
        await asyncio.sleep(0.4)
        drafter.signal(signal.SIGCONT)
        await until_used(loop, task, used, 450)


@pytest.mark.exhaustive
async def test_replaced_by_one_that_knows_nothing() -> None:
    spare = DrafterProcess(_DRAFTER)
    await spare.start()
    async with under_way(450) as (drafter, loop, task):
        drafter.signal(signal.SIGKILL)
        drafter.port = spare.port
        used = loop.stats.drafts_used
        await until_used(loop, task, used + 5, 450)
    spare.end()


async def test_a_wrong_token_is_no_drafter() -> None:
    drafter = DrafterProcess(_DRAFTER)
    await drafter.start()
    link = GrpcDraftLink(drafter.address, "a wrong secret")
    async with decoding(ToyTarget(), link) as loop:
        tokens, _, steps = await collect(loop, wanted(30))
        assert tokens == await plain(30)
        assert sum(step.num_drafted for step in steps) == 0
    drafter.end()
