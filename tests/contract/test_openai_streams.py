"""What happens around answers over HTTP: errors in the middle, clients that leave, sizes of events, keys, the end of a server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http import app, event_stream
from services.api.http import endpoints as http_endpoints
from services.api.http.server import HttpServer, serve_http
from speculation.errors import ConfigurationError, Internal, InvalidArgument, ResourceExhausted, Unavailable
from speculation.types import SamplingDefaults
from tests.running.patience import held_timeout
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.openai_types import check, events_of
from tests.servers.scripted_router import ScriptedRouter

FOX: list[Any] = [{"role": "user", "content": "fox"}]
CHAT = "/v1/chat/completions"
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"a": {}}}}}


@asynccontextmanager
async def served(
    router: ScriptedRouter, config: HttpConfig | None = None, **headers: str
) -> AsyncIterator[tuple[httpx2.AsyncClient, HttpServer]]:
    server = await serve_http(router, config or HttpConfig(port=0))
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
            yield client, server
    finally:
        await server.stop(0)


def openai_client(server: HttpServer, retries: int = 0) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=retries)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (ResourceExhausted("full", 2.5), 429, {"retry-after": "3", "retry-after-ms": "2500"}),
        (Unavailable("gone"), 503, {"retry-after": "1"}),
        (Internal("a bug"), 500, {"x-should-retry": "false"}),
        # Clients try 409 again, and 5xx.
        (ConfigurationError("not with these settings"), 400, {}),
    ],
)
async def test_errors_say_when_to_come_again(error: Any, status: int, headers: dict[str, str]) -> None:
    router = ScriptedRouter("hello")
    router.fails = (0, error)
    async with served(router) as (client, _):
        for stream in (False, True):
            answer = await client.post(CHAT, json={"messages": FOX, "stream": stream})
            assert answer.status_code == status
            assert {name: answer.headers[name] for name in headers} == headers
            kinds = {429: "rate_limit_error", 400: "invalid_request_error"}
            assert answer.json()["error"]["type"] == kinds.get(status, "server_error")


async def test_an_error_in_mid_stream_is_told() -> None:
    router = ScriptedRouter("hello")
    router.fails = (3, Unavailable("the verifier\nis gone"))
    async with served(router) as (client, server):
        answer = await client.post(CHAT, json={"messages": FOX, "stream": True})
        events = events_of(answer.text)
        assert events[-1] == {
            "error": {
                "message": "the verifier is gone", "type": "server_error", "param": None, "code": "service_unavailable",
            }
        }  # fmt: skip
        assert "".join(e["choices"][0]["delta"]["content"] for e in events[:-1]) == "hel"
        said: list[str] = []

        async def read() -> None:
            async for chunk in await openai_client(server).chat.completions.create(
                model="scripted", messages=FOX, stream=True
            ):
                said.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="gone"):
            await read()
        assert "".join(said) == "hel"


async def test_the_client_tries_again() -> None:
    router = ScriptedRouter("hello")
    router.fails = (0, ResourceExhausted("full", 0.05))
    async with served(router) as (_, server):

        async def recover() -> None:
            while not router.asked:
                await asyncio.sleep(0.001)
            router.fails = None

        recovering = asyncio.create_task(recover())
        answer = await openai_client(server, retries=2).chat.completions.create(model="scripted", messages=FOX)
        await recovering
        assert answer.choices[0].message.content == "hello" and len(router.asked) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_leaves_ends_its_generations(stream: bool, choices: int) -> None:
    router = ScriptedRouter("x" * 50)
    router.forever, router.waits = True, 0.001
    async with served(router) as (client, server):
        host, port = server.address.rsplit(":", 1)
        body = json.dumps({"messages": FOX, "stream": stream, "n": choices}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        async with asyncio.timeout(30):
            while len(router.asked) < choices:
                await asyncio.sleep(0.001)
            if stream:
                await reader.readuntil(b'"content":"x"')
            writer.close()
            while router.left < choices:
                await asyncio.sleep(0.001)
        assert (await client.get("/health")).status_code == 200


@pytest.mark.exhaustive
async def test_a_client_that_takes_nothing_is_left() -> None:
    router = ScriptedRouter("x" * 100_000, pieces=100_000)
    router.forever = router.bulky = True
    config = HttpConfig(port=0, public=PublicServerConfig(send_timeout_s=0.2))
    async with served(router, config) as (_, server):
        host, port = server.address.rsplit(":", 1)
        body = json.dumps({"messages": FOX, "stream": True}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as frozen:
            frozen.sendall(head.encode() + body)
            async with asyncio.timeout(60):
                while not router.left:
                    await asyncio.sleep(0.01)


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoints, "PING_S", 0.02)
    router = ScriptedRouter("ab")
    router.waits = 0.3
    async with served(router) as (client, _):
        answer = await client.post(CHAT, json={"messages": FOX, "stream": True})
        assert answer.text.count(": ping\n\n") >= 2
        # What stands between must neither keep the answer nor wait for its end.
        said = [answer.headers[name] for name in ("content-type", "cache-control", "x-accel-buffering")]
        assert said == ["text/event-stream; charset=utf-8", "no-cache", "no"]
        assert [event["choices"][0]["delta"].get("content") for event in events_of(answer.text)] == ["", "a", "b", None]


async def test_tools_are_found_in_what_a_model_says() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"a": "京 <b>"}}\n</tool_call>'
    text = f"I look. {call}\n{call}"
    for pieces in (1, 7):
        router = ScriptedRouter(text, pieces)
        async with served(router) as (client, server):
            asked: dict[str, Any] = {"messages": FOX, "tools": [LOOK], "logprobs": True}
            whole = (await client.post(CHAT, json=asked)).json()
            check(whole)
            choice = whole["choices"][0]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
            calls = choice["message"]["tool_calls"]
            assert [json.loads(each["function"]["arguments"]) for each in calls] == [{"a": "京 <b>"}] * 2
            assert len({each["id"] for each in calls}) == 2
            data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
            assert data.decode() == text
            events = events_of((await client.post(CHAT, json={**asked, "stream": True})).text)
            for event in events:
                check(event)
            streamed = [e["choices"][0] for e in events]
            assert b"".join(bytes(x["bytes"]) for c in streamed if c["logprobs"] for x in c["logprobs"]["content"]) == data
            async with openai_client(server).chat.completions.stream(model="scripted", messages=FOX, tools=[LOOK]) as stream:
                final = await stream.get_final_completion()
            message = final.choices[0].message
            assert message.tool_calls is not None and message.content is not None
            assert [tool.function.arguments for tool in message.tool_calls] == [c["function"]["arguments"] for c in calls]
            assert message.content.strip() == "I look."
            # One call at most: the answer ends after it.
            router.asked.clear()
            await client.post(CHAT, json={**asked, "parallel_tool_calls": False})
            form = router.asked[0].sampling.structured_outputs
            assert router.asked[0].sampling.stop == () and form is not None and form.kind == "grammar"
        assert json.loads(router.asked[0].chat.tools or "[]") == []


async def test_forced_calls_have_a_form() -> None:
    router = ScriptedRouter('[{"name": "look", "arguments": {"a": 1}}, {"name": "look", "arguments": {}}]', 5)
    async with served(router) as (client, _):
        answer = await client.post(CHAT, json={"messages": FOX, "tools": [LOOK], "tool_choice": "required"})
        assert [c["function"]["arguments"] for c in answer.json()["choices"][0]["message"]["tool_calls"]] == [
            '{"a": 1}',
            "{}",
        ]
        form = router.asked[0].sampling.structured_outputs
        assert form is not None and form.kind == "grammar"
        router.text = '{"a": 2}'
        named = {"type": "function", "function": {"name": "look"}}
        asked = {"messages": FOX, "tools": [LOOK], "tool_choice": named}
        whole = (await client.post(CHAT, json=asked)).json()["choices"][0]
        assert whole["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 2}'}
        assert whole["message"]["content"] is None and whole["finish_reason"] == "tool_calls"
        form = router.asked[1].sampling.structured_outputs
        assert form is not None and json.loads(form.text) == LOOK["function"]["parameters"]
        events = events_of((await client.post(CHAT, json={**asked, "stream": True})).text)
        deltas = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", ())]
        assert deltas[0]["id"].startswith("call_") and deltas[0]["function"]["name"] == "look"
        assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"a": 2}'
        assert all("id" not in delta for delta in deltas[1:])


async def test_forms_reach_the_router() -> None:
    router = ScriptedRouter("{}")
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "a", "description": "b", "strict": True, "schema": schema}}},
         "json", json.dumps(schema, ensure_ascii=False)),
        ({"structured_outputs": {"json": schema}}, "json", json.dumps(schema, ensure_ascii=False)),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", '["yes", "no"]'),
    ]  # fmt: skip
    async with served(router) as (client, _):
        for number, (body, kind, text) in enumerate(cases):
            answer = await client.post(CHAT, json={"messages": FOX, **body})
            assert answer.status_code == 200, answer.text
            form = router.asked[number].sampling.structured_outputs
            assert form is not None and (form.kind, form.text) == (kind, text)
        router.fails = 0, InvalidArgument("structured_outputs.json", "{}", "0 with structured_outputs.json")
        for body, named in ((cases[1][0], "response_format.json_schema.schema"), (cases[2][0], "structured_outputs.json")):
            error = (await client.post(CHAT, json={"messages": FOX, **body})).json()["error"]
            assert (error["param"], error["message"]) == (named, f"{named} is {{}}: must be 0 with {named}")
        tools = {"tools": [LOOK], "tool_choice": "required"}
        router.fails = 0, InvalidArgument("structured_outputs.grammar", "{}", "another")
        assert (await client.post(CHAT, json={"messages": FOX, **tools})).json()["error"]["param"] == "tools"
        router.fails = None
        await client.post(CHAT, json={"messages": FOX, "response_format": {"type": "text"}})
        assert router.asked[-1].sampling.structured_outputs is None


async def test_defaults_of_a_models_generation_config_count() -> None:
    router = ScriptedRouter("a").with_card(defaults=SamplingDefaults(temperature=0.3, max_tokens=77))
    async with served(router) as (client, _):
        for path, body in ((CHAT, {"messages": FOX}), ("/v1/completions", {"prompt": "fox"})):
            await client.post(path, json=body)
            # Unset: the router fills them in.
            assert (router.asked[-1].sampling.temperature, router.asked[-1].sampling.max_tokens) == (None, None)
            await client.post(path, json={**body, "ignore_generation_config": True})
            assert router.asked[-1].sampling.temperature == 1.0
        assert router.asked[-1].sampling.max_tokens == 16


async def test_a_key_in_either_header_is_its_tenants() -> None:
    keys = ("k" * 20, "l" * 20)
    public = PublicServerConfig(api_key_hashes=tuple(map(hash_key, keys)))
    router = ScriptedRouter("a")
    async with served(router, HttpConfig(port=0, public=public)) as (client, _):
        for headers in (
            {"authorization": f"Bearer {keys[0]}"},
            {"x-api-key": keys[1]},
            {"authorization": f"bearer {keys[0]}"},
        ):
            assert (await client.post(CHAT, json={"messages": FOX}, headers=headers)).status_code == 200
        first, second, third = (asked.tenant for asked in router.asked)
        assert first == third != second
        both = {"authorization": f"Bearer {keys[0]}", "x-api-key": keys[1]}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": keys[0]}, {"x-api-key": ""}, both):
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize")):
                answer = await client.request(method, path, headers=headers, json={} if method == "POST" else None)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert (answer.json()["error"]["code"], answer.json()["error"]["type"]) == (
                    "invalid_api_key", "authentication_error",
                )  # fmt: skip
        for path in ("/health", "/ready", "/version"):
            assert (await client.get(path)).status_code == 200


async def test_a_key_that_may_not_generate_may_not_tokenise(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{hash: {hash_key('k' * 20)}, scopes: [forget]}}\n")
    asked = {CHAT: {"messages": FOX}, "/tokenize": {"messages": FOX}, "/detokenize": {"tokens": [1]}}
    async with served(ScriptedRouter(), HttpConfig(port=0, public=PublicServerConfig(keys_file=keys))) as (client, _):
        for path, body in asked.items():
            answer = await client.post(path, json=body, headers={"x-api-key": "k" * 20})
            assert answer.status_code == 403 and "may not generate" in answer.json()["error"]["message"]


async def test_only_so_many_at_once() -> None:
    router = ScriptedRouter("x")
    router.forever, router.waits = True, 0.001
    config = HttpConfig(port=0, public=PublicServerConfig(max_concurrent_requests=1))
    body = {"messages": FOX, "stream": True}
    async with served(router, config) as (client, _), client.stream("POST", CHAT, json=body) as held:
        assert held.status_code == 200
        refused = await client.post(CHAT, json={"messages": FOX})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert (await client.get("/health")).status_code == 200


async def test_a_server_that_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    router = ScriptedRouter("x")
    router.forever, router.waits = True, 0.001
    server = await serve_http(router, HttpConfig(port=0))
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        async with client.stream("POST", CHAT, json={"messages": FOX, "stream": True}) as held:
            lines = held.aiter_lines()
            assert await anext(lines)
            grace_is_over = held_timeout(monkeypatch, app)
            stopping = asyncio.create_task(server.stop(0.3))
            await asyncio.sleep(0)
            told = await client.get("/ready")
            assert told.status_code == 503 and told.headers["retry-after"] == "1"
            assert (await client.post(CHAT, json={"messages": FOX})).status_code == 503
            grace_is_over()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "the server is stopping" in rest[-2]
        await stopping
    assert router.left == 1


async def test_readiness_is_the_routers() -> None:
    router = ScriptedRouter()
    router.is_ready = False
    async with served(router) as (client, _):
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).json() == {"status": "ok"}


async def test_hosts_by_name() -> None:
    async with served(ScriptedRouter(), HttpConfig(port=0, hosts=("api.example",))) as (client, _):
        assert (await client.get("/health", headers={"host": "api.example:443"})).status_code == 200
        assert (await client.get("/health")).status_code == 403


async def test_a_taken_port_and_an_open_server_are_refused() -> None:
    async with served(ScriptedRouter()) as (_, server):
        taken = HttpConfig(port=int(server.address.rpartition(":")[2]))
        with refuses(ConfigurationError, says="cannot listen"):
            await serve_http(ScriptedRouter(), taken)
        with refuses(ConfigurationError, field="server.host", value="0.0.0.0"):
            await serve_http(ScriptedRouter(), HttpConfig(port=0, public=PublicServerConfig(host="0.0.0.0")))
        shared = HttpConfig(port=free_port(), public=PublicServerConfig(shared=True))
        with refuses(ConfigurationError, field="server.http_port", value=0):
            await serve_http(ScriptedRouter(), replace(shared, port=0))
        one, two = [await serve_http(ScriptedRouter("a"), shared) for _ in range(2)]
        assert one.address == two.address
        await asyncio.gather(one.stop(0), two.stop(0))


def test_pings_come_before_balancers_give_up() -> None:
    assert event_stream.PING_S <= 30
