"""A client that takes nothing of its answer is given up once, and is told nothing more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.api.http.endpoints import Endpoints
from services.api.http.event_stream import EventStream
from speculation.errors import Cancelled


async def test_who_takes_nothing_is_waited_for_once() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def comes(*_: object) -> tuple[int, object]:
        return 0, object()

    async def told(*_: object) -> list[dict[str, Any]]:
        return [{"choices": [{"text": "a"}]}]

    running = SimpleNamespace(next=comes, over=False)
    answer = SimpleNamespace(opening=list, add=told, failed=told)
    stream = EventStream(cast(Any, send), [], None, 0.02)
    with pytest.raises(Cancelled):
        await cast(Any, Endpoints._streamed)(None, None, stream, running, answer, usage=False)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
