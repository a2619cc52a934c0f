"""How often a component is tried again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.links import reconnect


class Enough(Exception):
    """A test has seen enough."""


class Channel:
    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def channel_ready(self) -> None:
        pass


async def pauses(talk: Any, count: int) -> list[float]:
    """The first pauses between conversations that go as ``talk`` does."""
    seen: list[float] = []

    async def pause(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == count:
            raise Enough

    async def resolve() -> str:
        return "nowhere:1"

    with pytest.raises(Enough):
        await reconnect.stay_connected("drafter", resolve, 1, talk, channel_to=lambda *of: Channel(), pause=pause)
    return seen


async def test_one_that_ends_every_stream_at_once_is_tried_less_and_less_often() -> None:
    async def refused(channel: object) -> None:
        raise RuntimeError("of another version")

    assert await pauses(refused, 7) == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


async def test_one_that_was_there_is_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "_RETRY_MOST_S", 0.01)

    async def lasting(channel: object) -> None:
        await asyncio.sleep(0.02)

    assert await pauses(lasting, 3) == [0.1, 0.1, 0.1]
