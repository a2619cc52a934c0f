"""Sizes of streamed events tell nothing of what was drafted right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.api.config import HttpConfig
from services.api.http.event_stream import EventStream, event_bytes
from services.api.http.openai.errors import error_body
from services.api.http.written_json import written
from speculation.errors import Unavailable
from tests.contract.test_openai_streams import CHAT, FOX, served
from tests.servers.openai_types import check, events_of
from tests.servers.scripted_router import ScriptedRouter


@pytest.mark.examples(2)
@pytest.mark.parametrize("padding", [64, 256])
async def test_sizes_of_events_tell_nothing(padding: int) -> None:
    """Steps of one to twelve tokens look alike, unless a request wants them as they are."""
    sizes = {}
    for obfuscated in (None, False):
        options = {} if obfuscated is None else {"stream_options": {"include_obfuscation": obfuscated}}
        for pieces in (1, 4, 12):
            router = ScriptedRouter("abcdefghijkl" * 2, pieces)
            async with served(router, HttpConfig(port=0, padding=padding)) as (client, _):
                answer = await client.post(
                    CHAT, json={"messages": FOX, "stream": True, **options}, headers={"x-request-id": "r"}
                )
                events = events_of(answer.text)
                assert [check(event) for event in events]
                blocks = answer.text.encode().split(b"\n\n")[1:-3]
                sizes[obfuscated, pieces] = {len(block) + 2 for block in blocks}
                assert all(("obfuscation" in event) == (obfuscated is None) for event in events)
    assert all(size % padding == 0 for size in sizes[None, 1] | sizes[None, 4] | sizes[None, 12])
    if padding == 256:
        assert sizes[None, 1] == sizes[None, 4] == sizes[None, 12]
    assert len({*sizes[False, 1], *sizes[False, 4], *sizes[False, 12]}) == 3


def test_the_filler_is_as_long_as_needed() -> None:
    for length in range(200):
        event = event_bytes(written({"choices": [1], "text": "ü" * length}), 64)
        assert len(event) % 64 == 0
        assert json.loads(event[len("data: ") :])["text"] == "ü" * length


@pytest.mark.parametrize("message", ["short", "a longer message " * 30])
async def test_errors_of_private_answers_are_as_long_as_other_events(message: str) -> None:
    sent: list[bytes] = []

    async def send(part: Any) -> None:
        sent.append(part.get("body", b""))

    for everything in (True, False):
        stream = EventStream(send, [], 1024, 60, everything=everything)
        await stream.fail([error_body(Unavailable(message))])
        error, done, _ = sent
        assert (len(error) == 1024) is everything
        assert json.loads(error[len("data: ") :])["error"]["message"].startswith(
            "short" if message == "short" else "a longer"
        )
        assert done == b"data: [DONE]\n\n"
        sent.clear()
