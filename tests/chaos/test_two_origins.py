"""Two drafters for one loop, each in a process of its own, killed, frozen and delayed by turns: no token ever changes, and
who is gone costs its own nodes only."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from services.links.grpc_draft import GrpcDraftLink
from services.links.in_process import InProcessDraftLink
from services.verifier.engine.loop import DecodingLoop
from speculation.types import Plan
from tests.drafters.drafter_process import DrafterProcess
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, decoding, origin, request
from tests.running.patience import PATIENCE_S, until

_DRAFTER = """
import asyncio, random
from services.links.grpc_draft import serve_drafter
from tests.engine.fakes import RandomDrafter

class Drafter(RandomDrafter):
    async def _draft(self, session_id, max_nodes):
        await asyncio.sleep({delay_s!r} * random.random())
        return await super()._draft(session_id, max_nodes)

async def main():
    server, port = await serve_drafter(Drafter(mood={mood!r}), "127.0.0.1:0", "a shared secret")
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""
TOKENS = 400
PLAN = Plan(strategy="test", sources=("near", "far"), max_nodes=6)
SAMPLINGS: list[dict[str, object]] = [{}, {"temperature": 0.9, "seed": 5}]

Both = tuple[DrafterProcess, DrafterProcess]
Chaos = Callable[[Both], Awaitable[None]]


async def killed(both: Both) -> None:
    """One after the other, for good."""
    for drafter in both:
        drafter.signal(signal.SIGKILL)
        await asyncio.sleep(0.3)


async def replaced(both: Both) -> None:
    """Each by one that knows nothing, at another port."""
    for drafter in (*both, *both):
        drafter.end()
        await drafter.start()
        await asyncio.sleep(0.2)


async def frozen(both: Both) -> None:
    """By turns."""
    for drafter in (*both, *both):
        drafter.signal(signal.SIGSTOP)
        await asyncio.sleep(0.15)
        drafter.signal(signal.SIGCONT)


async def left_alone(both: Both) -> None:
    """As slow as they are."""


@asynccontextmanager
async def drafted(
    delays_s: tuple[float, float], moods: tuple[str, str]
) -> AsyncIterator[tuple[Both, list[GrpcDraftLink], DecodingLoop]]:
    both = [
        DrafterProcess(_DRAFTER.format(delay_s=delay_s, mood=mood)) for delay_s, mood in zip(delays_s, moods, strict=True)
    ]
    target = ToyTarget()
    target.delay_s = 0.003
    for drafter in both:
        await drafter.start()
    links = [GrpcDraftLink(drafter.address, "a shared secret") for drafter in both]
    origins = [origin(link, name, sources=[name]) for link, name in zip(links, PLAN.sources, strict=True)]
    try:
        async with decoding(target, *origins, draft_deadline_s=0.02) as loop:
            await until(lambda: all(link.connected for link in links))
            yield (both[0], both[1]), links, loop
    finally:
        for drafter in both:
            drafter.end()


async def answers(loop: DecodingLoop, plan: Plan) -> list[list[int]]:
    wanted = [
        request(f"{plan.strategy}{number}", [1, 2, number], plan, max_tokens=TOKENS, ignore_eos=True, **sampling)
        for number, sampling in enumerate(SAMPLINGS)
    ]
    return [tokens for tokens, _, _ in await asyncio.gather(*(collect(loop, one) for one in wanted))]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "moods", [("random", "good"), pytest.param(("good", "random"), marks=pytest.mark.exhaustive)], ids="-".join
)
@pytest.mark.parametrize(
    ("chaos", "delays_s"),
    [(left_alone, (0.0, 0.05)), (killed, (0.0, 0.0)), (replaced, (0.002, 0.0)), (frozen, (0.0, 0.002))],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_no_token_changes(chaos: Chaos, delays_s: tuple[float, float], moods: tuple[str, str]) -> None:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as alone:
        expected = await answers(alone, PLAIN)
    async with drafted(delays_s, moods) as (both, _, loop):
        decoding_now = asyncio.create_task(answers(loop, PLAN))
        async with asyncio.timeout(PATIENCE_S):
            while loop.stats.drafts_used < 3:
                await asyncio.sleep(0.005)
                if decoding_now.done():
                    assert decoding_now.result() == expected
                    decoding_now = asyncio.create_task(answers(loop, PLAN))
        await chaos(both)
        assert await decoding_now == expected


@pytest.mark.exhaustive
async def test_both_are_checked_and_one_that_is_gone_costs_its_own_nodes_only() -> None:
    async with drafted((0.0, 0.0), ("random", "random")) as (both, links, loop):
        nodes = loop.stats.nodes_by_source
        # How many answers it takes until both have drafted, and drafted often, is the machine's affair.
        async with asyncio.timeout(PATIENCE_S):
            while set(nodes) != set(PLAN.sources):
                await answers(loop, PLAN)
        both[0].signal(signal.SIGKILL)
        await until(lambda: not links[0].connected)
        before = dict(nodes)
        async with asyncio.timeout(PATIENCE_S):
            while nodes["far"] <= before["far"] + 100:
                await answers(loop, PLAN)
        assert nodes["near"] == before["near"]
