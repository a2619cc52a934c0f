"""Forgetting a tenant: what the target and the drafter hear of it, and what becomes of requests under way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.links.in_process import InProcessDraftLink
from speculation.errors import Unavailable
from speculation.messages import Draft, DraftFailure, OpenSession
from speculation.ports import DraftReceiver
from tests.fakes import RandomDrafter, ToyTarget, collect, decoding, request


async def test_a_drafter_that_returns_is_told_whom_to_forget() -> None:
    drafter = RandomDrafter()
    target = ToyTarget()
    link = RejoiningLink(drafter)
    async with decoding(target, link) as loop:
        await loop.forget("one")
        await loop.forget("two")
        # An idle loop wakes for it.
        async with asyncio.timeout(5):
            while sorted(target.forgotten) != ["one", "two"] or drafter.forgotten != ["one", "two"]:
                await asyncio.sleep(0.01)
        link.reconnect()
        async with asyncio.timeout(5):
            while drafter.forgotten != ["one", "two"] * 2:
                await asyncio.sleep(0.01)
    with pytest.raises(Unavailable):
        await loop.forget("three")


class RejoiningLink(InProcessDraftLink):
    """Can seem to have been away."""

    async def start(self, receiver: DraftReceiver) -> None:
        self.reconnect = receiver.on_connected
        await super().start(receiver)


@pytest.mark.parametrize("when", ["live", "waiting"])
async def test_what_is_under_way_leaves_nothing_to_a_forgotten_tenant(when: str) -> None:
    """Not even where a drafter asks for it anew, or it has to step back."""
    opened: list[str] = []
    drafter, target = RandomDrafter(), ToyTarget(rooms=1)
    target.delay_s = 0.01
    begin = drafter.open

    async def opening(message: OpenSession) -> Draft | DraftFailure:
        opened.append(message.tenant)
        return await begin(message)

    drafter.open = opening  # type: ignore[method-assign]
    link = RejoiningLink(drafter)
    async with decoding(target, link) as loop:
        wanted = [replace(request(name, [1, 2], max_tokens=60, ignore_eos=True), tenant="one") for name in ("a", "b")]
        running = [asyncio.create_task(collect(loop, one)) for one in wanted[: 1 if when == "live" else 2]]
        while not opened:
            await asyncio.sleep(0.01)
        await loop.forget("one")
        link.reconnect()
        await asyncio.gather(*running)
        while len(target.forgotten) < 1 + len(running):
            await asyncio.sleep(0.01)
    assert opened[0] == "one"
    assert len(opened) > 1
    # What it has left under a name of its own goes with it.
    assert set(opened[1:]) <= set(target.forgotten)
    assert "one" not in opened[1:]
