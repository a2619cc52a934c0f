"""Events of responses: calls between texts, errors in the middle, sizes, and the end of a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services.api.config import HttpConfig, PublicServerConfig
from services.privacy.config import Privacy
from speculation.errors import Internal, InvalidArgument, OutriderError, ResourceExhausted
from tests.contract.test_openai_streams import openai_client, served
from tests.servers.openai_types import check_response, response_events_of
from tests.servers.responses import CHAT, PATH, assembled, checked, without_names
from tests.servers.scripted_router import ScriptedRouter

LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.examples(3)
@pytest.mark.parametrize("pieces", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", ["plain"]),
        (CALL, [("look", '{"a": 1}')]),
        (f"\n\n{CALL}", [("look", '{"a": 1}')]),
        (f"Let me look.\n{CALL}\n{CALL}", ["Let me look.", ("look", '{"a": 1}'), ("look", '{"a": 1}')]),
        (f"{CALL}\nDone.", [("look", '{"a": 1}'), "\nDone."]),
        ("\n \n", ["\n \n"]),
        ("\n\ntext", ["\n\ntext"]),
        ("", [""]),
    ],
)
async def test_calls_and_texts_are_items(pieces: int, text: str, wanted: list[Any]) -> None:
    asked: dict[str, Any] = {"input": "x", "tools": [LOOK], "include": ["message.output_text.logprobs"], "seed": 1}
    async with served(ScriptedRouter(text, pieces)) as (client, _):
        whole = (await client.post(PATH, json=asked)).json()
        check_response(whole)
        events = checked(response_events_of((await client.post(PATH, json={**asked, "stream": True})).text))
    told = [
        item["content"][0]["text"] if item["type"] == "message" else (item["name"], item["arguments"])
        for item in whole["output"]
    ]
    assert told == wanted
    assert len({item["id"] for item in whole["output"]}) == len(wanted)
    last = events[-1]["response"]
    assert without_names(last) == without_names(whole)
    assert assembled(events) == last["output"]
    # The log-probabilities of a message are those of its text, with what came after it at the end.
    for item in whole["output"]:
        if item["type"] == "message":
            data = b"".join(bytes(each["bytes"]) for each in item["content"][0]["logprobs"])
            assert data.decode() == item["content"][0]["text"]


@pytest.mark.parametrize("pieces", [1, 7, 1000])
async def test_thoughts_are_items(pieces: int) -> None:
    text = f"<think>\nHm, hm.\n</think>\n\nLet me look.\n{CALL}"
    router = ScriptedRouter(text, pieces).with_card(thoughts="think")
    asked: dict[str, Any] = {"input": "x", "tools": [LOOK], "seed": 1, "include": ["message.output_text.logprobs"]}
    async with served(router) as (client, _):
        whole = (await client.post(PATH, json=asked)).json()
        check_response(whole)
        events = checked(response_events_of((await client.post(PATH, json={**asked, "stream": True})).text))
        chat = (await client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "seed": 1})).json()
    thought, said, call = whole["output"]
    assert thought["type"] == "reasoning" and thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": chat["choices"][0]["message"]["reasoning_content"]}]
    assert said["content"][0]["text"] == "Let me look." and call["arguments"] == '{"a": 1}'
    assert b"".join(bytes(each["bytes"]) for each in said["content"][0]["logprobs"]).decode() == "Let me look."
    reasoning = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoning == chat["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    assert without_names(events[-1]["response"]) == without_names(whole)
    assert assembled(events) == events[-1]["response"]["output"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResourceExhausted("full"), "rate_limit_exceeded"),
        (Internal("a bug"), "server_error"),
        (InvalidArgument("max_tokens", 5, "less"), "invalid_prompt"),
    ],
)
async def test_an_error_in_mid_stream_is_a_failed_response(error: OutriderError, code: str) -> None:
    router = ScriptedRouter("hello")
    router.fails = (3, error)
    async with served(router) as (client, server):
        answer = await client.post(PATH, json={"input": "x", "stream": True})
        events = checked(response_events_of(answer.text))
        last = events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == code and last["response"]["usage"] is None
        assert last["response"]["output"][0]["content"][0]["text"] == "hel"
        assert (await client.get(f"{PATH}/{last['response']['id']}")).json() == last["response"]
        # Whole answers, and streams that have not begun, have a status instead.
        router.fails = (0, error)
        for streams in (False, True):
            refused = await client.post(PATH, json={"input": "x", "stream": streams})
            assert refused.status_code == {"rate_limit_exceeded": 429, "server_error": 500, "invalid_prompt": 400}[code]
            if code == "invalid_prompt":
                assert refused.json()["error"]["param"] == "max_output_tokens"
        router.fails = (3, error)
        async with openai_client(server) as openai:
            kinds = [event.type async for event in await openai.responses.create(model="scripted", input="x", stream=True)]
            assert kinds[-1] == "response.failed"


async def test_sizes_of_events_tell_nothing() -> None:
    sizes: dict[Any, set[int]] = {}
    for obfuscated in (None, False):
        options = {} if obfuscated is None else {"stream_options": {"include_obfuscation": obfuscated}}
        for pieces in (1, 4, 12):
            async with served(ScriptedRouter("abcdefghijkl" * 2, pieces)) as (client, _):
                text = (await client.post(PATH, json={"input": "x", "stream": True, **options})).text
                response_events_of(text)
                deltas = [block for block in text.encode().split(b"\n\n") if b"text.delta" in block]
                sizes[obfuscated, pieces] = {len(block) + 2 for block in deltas}
                assert all((b"obfuscation" in block) == (obfuscated is None) for block in deltas)
    assert sizes[None, 1] == sizes[None, 4] == sizes[None, 12]
    assert all(size % 256 == 0 for size in sizes[None, 1])
    # The numbers of events have one digit or two.
    assert len({*sizes[False, 1], *sizes[False, 4], *sizes[False, 12]}) >= 3


async def test_private_events_are_all_padded() -> None:
    config = HttpConfig(port=0, public=PublicServerConfig(port=0, privacy=Privacy(mode="strict", tokens=16)))
    async with served(ScriptedRouter("abcdefghijkl" * 2, 4), config) as (client, _):
        text = (await client.post(PATH, json={"input": "x", "stream": True})).text
        assert len(response_events_of(text)) > 8
        assert {(len(block) + 2) % 1024 for block in text.encode().split(b"\n\n")[:-1]} == {0}
        plain = {"input": "x", "stream": True, "stream_options": {"include_obfuscation": False}}
        refused = (await client.post(PATH, json=plain)).json()["error"]
        assert refused["param"] == "stream_options.include_obfuscation"


async def test_a_server_that_stops_fails_what_it_cannot_finish() -> None:
    router = ScriptedRouter("words")
    router.forever, router.waits = True, 0.001
    body = {"input": "x", "stream": True}
    async with served(router) as (client, server), client.stream("POST", PATH, json=body) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        stopping = asyncio.create_task(server.stop(0.05))
        text += "".join([piece async for piece in pieces])
        last = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
        await stopping
    assert router.left == 1
