"""A decoding loop that is held: no pass begins until it goes on, and no token is another one."""

from __future__ import annotations

import asyncio

import pytest

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.clock import now
from speculation.errors import ResourceExhausted, Unavailable
from speculation.messages import GenerationRequest
from tests.engine.fakes import RandomDrafter, ToyTarget, collect, request
from tests.engine.simulated import PASS_S, decoding, simulated


async def alone(wanted: GenerationRequest) -> list[int]:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as loop:
        return (await collect(loop, wanted))[0]


@pytest.mark.parametrize("depth", [1, 2])
@simulated
async def test_a_held_loop_begins_no_pass_and_goes_on_with_the_same_tokens(depth: int) -> None:
    wanted = [request(name, [1, 2, n], max_tokens=40, ignore_eos=True) for n, name in enumerate("abc")]
    expected = [await alone(each) for each in wanted]
    target = ToyTarget(depth=depth)
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        tasks = [asyncio.create_task(collect(loop, each)) for each in wanted]
        await asyncio.sleep(5 * PASS_S)
        await loop.hold.begin()
        late = asyncio.create_task(collect(loop, request("d", [1], max_tokens=3, ignore_eos=True)))
        passes = loop.stats.times.steps
        await asyncio.sleep(100 * PASS_S)
        assert loop.stats.times.steps == passes > 0
        assert not late.done() and loop.healthy
        loop.hold.end()
        assert [(await task)[0] for task in tasks] == expected
        assert len((await late)[0]) == 3


@simulated
async def test_who_waits_for_too_long_in_a_pause_is_refused_then() -> None:
    async def refused_after_s(name: str) -> float:
        began = now()
        with pytest.raises(ResourceExhausted, match="max_wait_s"):
            await collect(loop, request(name, [1], max_tokens=3))
        return now() - began

    async with decoding(ToyTarget(), max_wait_s=10.0) as loop:
        await loop.hold.begin()
        first = asyncio.create_task(refused_after_s("first"))
        await asyncio.sleep(4.0)
        second = asyncio.create_task(refused_after_s("second"))
        assert await asyncio.gather(first, second) == pytest.approx([10.0, 10.0], abs=0.1)
        loop.hold.end()
        assert (await collect(loop, request("third", [1], max_tokens=3)))[0]


@pytest.mark.parametrize("gone", [False, True])
@simulated
async def test_whoever_waits_for_it_hears_that_it_goes_on(gone: bool) -> None:
    wanted = request("r", [1, 2, 3], max_tokens=40, ignore_eos=True)
    expected = await alone(wanted)
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter())) as loop:
        task = asyncio.create_task(collect(loop, wanted))
        await asyncio.sleep(2.5 * PASS_S)
        holding = asyncio.create_task(loop.hold.begin())
        # In the middle of a pass.
        await asyncio.sleep(0)
        assert loop.hold.on
        if gone:
            holding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holding
        else:
            loop.hold.end()
            with pytest.raises(Unavailable, match="resumed"):
                await holding
        assert not loop.hold.on
        assert (await task)[0] == expected
