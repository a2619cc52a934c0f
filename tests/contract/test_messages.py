"""Anthropic's own client against /v1/messages: whole and streamed answers, calls of tools, counts, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message

from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http import endpoints
from services.api.http.messages.replies import CountReply, MessageErrorReply, MessageEvent, MessageReply
from services.api.http.server import HttpServer, serve_http
from services.api.messages import ChatMessage
from speculation.errors import ResourceExhausted, Unavailable
from tests.http_service import HttpService
from tests.scripted_router import ScriptedRouter

FOX: list[Any] = [{"role": "user", "content": "fox"}]
LOOK: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = 'I look.\n<tool_call>{"name": "look", "arguments": {"a": 1e2}}</tool_call>'
CLIENT = httpx2.Client(timeout=60)


@pytest.fixture
def client(both_entries: HttpService) -> Iterator[Anthropic]:
    with Anthropic(base_url=both_entries.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@asynccontextmanager
async def served(
    router: ScriptedRouter, config: HttpConfig | None = None, key: str = "none"
) -> AsyncIterator[tuple[AsyncAnthropic, HttpServer]]:
    server = await serve_http(router, config or HttpConfig(port=0))
    try:
        async with AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0) as client:
            yield client, server
    finally:
        await server.stop(0)


def post(service: HttpService, path: str = "/v1/messages", **body: Any) -> httpx2.Response:
    return CLIENT.post(service.url + path, json={"messages": FOX, **({} if "count" in path else {"max_tokens": 4}), **body})


def events_of(body: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name."""
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] != "error":
            MessageEvent.model_validate(found[-1], strict=True)
    return found


def test_a_message_whole_and_streamed(client: Anthropic, both_entries: HttpService) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": FOX, "max_tokens": 20}
    own = {"seed": 3, "ignore_eos": True, "return_token_ids": True, "speculation": {"report": "sources"}}
    whole = client.messages.create(**asked, extra_body=own)
    assert (whole.type, whole.role, whole.model, whole.stop_reason, whole.stop_sequence) == (
        "message",
        "assistant",
        "tiny",
        "max_tokens",
        None,
    )
    assert whole.usage.output_tokens == 20 and whole.id.startswith("msg_")
    (block,) = whole.content
    with client.messages.stream(**asked, extra_body=own) as stream:
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (block.text, whole.stop_reason)  # type: ignore[union-attr]
    raw = post(both_entries, **{**asked, **own}).json()
    told = MessageReply.model_validate(raw, strict=True)
    assert set(raw) <= {*MessageReply.model_fields, "speculation"}
    events = events_of(post(both_entries, **{**asked, **own}, stream=True).text)
    assert [id for event in events for id in event.get("token_ids", ())] == told.token_ids
    sources = [token for event in events for token in event.get("speculation", {}).get("tokens", ())]
    assert sources == raw["speculation"]["tokens"] or [each["id"] for each in sources] == told.token_ids
    chat = CLIENT.post(f"{both_entries.url}/v1/chat/completions", json={"messages": FOX, "max_tokens": 20, **own}).json()
    assert chat["choices"][0]["message"]["content"] == block.text
    assert (chat["choices"][0]["token_ids"], chat["prompt_token_ids"]) == (told.token_ids, told.prompt_token_ids)
    assert chat["usage"]["prompt_tokens"] == told.usage.input_tokens + told.usage.cache_read_input_tokens


def test_a_stop_sequence_is_told(client: Anthropic, both_entries: HttpService) -> None:
    own: dict[str, Any] = {"seed": 3, "ignore_eos": True}
    text = client.messages.create(model="tiny", messages=FOX, max_tokens=20, extra_body=own).content[0].text  # type: ignore[union-attr]
    stop = text[5:8]
    cut = client.messages.create(model="tiny", messages=FOX, max_tokens=20, stop_sequences=[stop], extra_body=own)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]
    events = events_of(post(both_entries, max_tokens=20, stop_sequences=[stop], stream=True, **own).text)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_the_context_bounds_a_message(client: Anthropic) -> None:
    """As with Anthropic's newer models, one may ask for more than there is room for."""
    long = client.messages.create(model="tiny", messages=FOX, max_tokens=32_000, extra_body={"ignore_eos": True, "seed": 1})
    assert long.stop_reason == "model_context_window_exceeded"
    assert long.usage.input_tokens + (long.usage.cache_read_input_tokens or 0) + long.usage.output_tokens == 512
    warm = client.messages.create(model="tiny", messages=FOX, max_tokens=0)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)


def test_tokens_are_counted_as_they_are_sent(client: Anthropic, both_entries: HttpService) -> None:
    asked: dict[str, Any] = {"model": "tiny", "system": "quick", "messages": FOX, "tools": [LOOK]}
    count = client.messages.count_tokens(**asked)
    answer = client.messages.create(**asked, max_tokens=1)
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    raw = post(both_entries, "/v1/messages/count_tokens").json()
    assert CountReply.model_validate(raw, strict=True).model_dump() == raw


async def test_a_conversation_is_read_as_a_chat() -> None:
    called = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": "ü"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages: list[Any] = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "look"}, called]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "gone"}], "is_error": True},
            {"type": "text", "text": "so?"},
        ]},
        {"role": "system", "content": "briefly"},
        {"role": "assistant", "content": "It"},
    ]  # fmt: skip
    seen: list[Any] = []

    class Seeing(ScriptedRouter):
        async def tokenize(self, request: Any) -> tuple[int, ...]:
            seen.append(request)
            return (1,)

    async with served(
        Seeing("words").with_card(template_options=("enable_thinking", "reasoning_effort"), reads_thoughts=True)
    ) as (client, _):
        await client.messages.create(
            model="scripted", system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], messages=messages,
            max_tokens=5, thinking={"type": "disabled"}, metadata={"user_id": "x"},
            tools=[LOOK], tool_choice={"type": "auto", "disable_parallel_tool_use": False}, output_config={"effort": "low"},
            extra_headers={"anthropic-beta": "a-1,b-2"}, extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9},
        )  # fmt: skip
    (request,) = seen
    calls = json.dumps(
        [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"a": "ü"}}}], ensure_ascii=False
    )
    assert request.input == (
        ChatMessage(role="system", content="a\nb"),
        ChatMessage(role="user", content="one\ntwo"),
        ChatMessage(role="assistant", content="look", tool_calls=calls, reasoning="hm"),
        ChatMessage(role="tool", content="Error: gone", tool_call_id="t1"),
        ChatMessage(role="user", content="so?"),
        ChatMessage(role="system", content="briefly"),
        ChatMessage(role="assistant", content="It"),
    )
    assert json.loads(request.chat.template_kwargs) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert request.chat.continue_final_message and not request.chat.add_generation_prompt
    assert json.loads(request.chat.tools)[0]["function"]["parameters"] == LOOK["input_schema"]


@pytest.mark.parametrize("pieces", [1, 3, 100])
async def test_calls_are_blocks(pieces: int) -> None:
    async with served(ScriptedRouter(CALL, pieces)) as (client, server):
        asked: dict[str, Any] = {"model": "scripted", "messages": FOX, "max_tokens": 9, "tools": [LOOK]}
        whole = await client.messages.create(**asked)
        text, call = whole.content
        assert (whole.stop_reason, text.text, call.name, call.input) == ("tool_use", "I look.", "look", {"a": 100.0})
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content] == [
            block.model_dump(exclude={"id", "parsed_output"}) for block in whole.content
        ]
        async with httpx2.AsyncClient(timeout=60) as plain:
            body = (await plain.post(f"{server.url}/v1/messages", json={**asked, "stream": True})).text
    events = events_of(body)
    assert [event["type"] for event in events if "delta" not in event["type"] or event["type"] == "message_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "content_block_start", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    # The model's own text of the arguments.
    assert (
        "".join(event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta")
        == '{"a": 1e2}'
    )


@pytest.mark.parametrize("pieces", [1, 100])
async def test_thoughts_are_blocks_that_can_be_sent_back(pieces: int) -> None:
    router = ScriptedRouter("<think>\nhm, so\n</think>\n\nFox.", pieces).with_card(thoughts="think")
    async with served(router) as (client, _):
        asked: dict[str, Any] = {"model": "scripted", "messages": FOX, "max_tokens": 99}
        whole = await client.messages.create(**asked)
        told = [block.model_dump(exclude={"citations", "parsed_output"}) for block in whole.content]
        thought, said = told
        assert (thought["type"], thought["thinking"].strip(), thought["signature"]) == ("thinking", "hm, so", "")
        assert said == {"type": "text", "text": "Fox."}
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert [block.model_dump(exclude={"citations", "parsed_output"}) for block in final.content] == told
        assert whole.usage.output_tokens_details is not None and whole.usage.output_tokens_details.thinking_tokens > 5
        back: Any = [*FOX, {"role": "assistant", "content": whole.content}, *FOX]
        await client.messages.create(model="scripted", messages=back, max_tokens=9)


async def test_the_clients_tool_runner_sends_the_conversation_whole() -> None:
    """It first asks for a conversation that the server keeps, and understands why not."""
    called: list[float] = []

    @anthropic.beta_async_tool
    async def look(a: float) -> str:
        """Looks."""
        called.append(a)
        return "seen"

    router = ScriptedRouter(CALL)
    async with served(router) as (client, _):
        runner = client.beta.messages.tool_runner(
            model="scripted", messages=FOX, max_tokens=9, tools=[look], max_iterations=2, betas=["a-1"]
        )
        told = [message.stop_reason async for message in runner]
    assert told == ["tool_use"] * 2 and called == [100.0] * 2
    first, second = router.asked
    assert len(second.input) > len(first.input)


async def test_an_input_that_is_no_object_goes_there_and_back() -> None:
    cut = '<tool_call>{"name": "look", "arguments": "[1e999"}</tool_call>'
    odd = '<tool_call>{"name": "look", "arguments": [1e999]}</tool_call>'
    for said, kept in ((odd, "[1e999]"), (cut, None)):
        router = ScriptedRouter(said)
        async with served(router) as (client, _):
            answer = await client.messages.create(model="scripted", messages=FOX, max_tokens=9, tools=[LOOK])
            assert isinstance(answer, Message)
            if kept is not None:
                assert answer.content[0].input == {"INVALID_JSON": kept}  # type: ignore[union-attr]
            back = [*FOX, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": getattr(answer.content[0], "id", "x")}]}]  # fmt: skip
            await client.messages.create(model="scripted", messages=back, max_tokens=9, tools=[LOOK])


async def test_choices_of_tools(both_entries: HttpService) -> None:
    asked: dict[str, Any] = {"tools": [LOOK], "max_tokens": 200, "seed": 1}
    for choice in ({"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        answer = post(both_entries, **asked, tool_choice=choice).json()
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert calls and calls == answer["content"] and {call["name"] for call in calls} == {"look"}
        assert len(calls) == 1 or "disable_parallel_tool_use" not in choice
    plain = post(both_entries, **asked, tool_choice={"type": "none"}).json()
    assert plain["content"][0]["text"] == post(both_entries, **{**asked, "tools": []}).json()["content"][0]["text"]


async def test_a_schema_is_followed(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = client.messages.create(model="tiny", messages=FOX, max_tokens=60, output_config=form, extra_body={"seed": 1})
    assert json.loads(answer.content[0].text)["a"] in (1, 2)  # type: ignore[union-attr]


async def test_pings_and_errors_in_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PING_S", 0.05)
    router = ScriptedRouter("hello", 2)
    router.waits, router.fails = 0.2, (2, Unavailable("the verifier\nis gone"))
    async with served(router) as (client, server):
        async with httpx2.AsyncClient(timeout=60) as plain:
            answer = await plain.post(f"{server.url}/v1/messages", json={"messages": FOX, "max_tokens": 9, "stream": True})
        events = events_of(answer.text)
        assert {"type": "ping"} in events
        assert events[-1] == {
            "type": "error", "request_id": answer.headers["request-id"],
            "error": {
                "type": "overloaded_error", "message": "the verifier is gone",
                "details": {"error_code": "service_unavailable", "param": None},
            },
        }  # fmt: skip
        with pytest.raises(anthropic.APIStatusError, match="verifier"):
            async with client.messages.stream(model="scripted", messages=FOX, max_tokens=9) as stream:
                await stream.get_final_message()


async def test_events_are_padded_and_private_ones_all_of_one_size() -> None:
    async with served(ScriptedRouter("ab" * 20, 2)) as (_, server), httpx2.AsyncClient(timeout=60) as plain:
        for own, all_of_them in (({}, False), ({"privacy": "strict"}, True)):
            body = {"messages": FOX, "max_tokens": 9, "stream": True, **own}
            text = (await plain.post(f"{server.url}/v1/messages", json=body)).text
            blocks = [f"{block}\n\n" for block in text.removesuffix("\n\n").split("\n\n")]
            sizes = {len(block) for block in blocks if all_of_them or "content_block_delta" in block}
            assert sizes and all(size % 128 == 0 for size in sizes)
            events_of(text)


async def test_errors_have_anthropics_shape(tmp_path: Path) -> None:
    public = PublicServerConfig(port=0, api_key_hashes=(hash_key("right"),))
    router = ScriptedRouter("hello")
    async with served(router, HttpConfig(port=0, public=public), key="wrong") as (client, server):
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="scripted", messages=FOX, max_tokens=9)
        async with AsyncAnthropic(base_url=server.url, auth_token="right", api_key=None, max_retries=0) as bearer:
            assert (await bearer.messages.create(model="scripted", messages=FOX, max_tokens=9)).content
        right = client.with_options(api_key="right")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await right.messages.create(model="claude-9", messages=FOX, max_tokens=9)
        body: Any = missing.value.body
        MessageErrorReply.model_validate(body, strict=True)
        assert body["error"]["type"] == "not_found_error" and body["request_id"] == missing.value.request_id
        router.fails = (0, ResourceExhausted("full", 2.5))
        with pytest.raises(anthropic.RateLimitError) as full:
            await right.messages.create(model="scripted", messages=FOX, max_tokens=9)
        assert full.value.response.headers["retry-after"] == "3"
        async with httpx2.AsyncClient(timeout=60, headers={"x-api-key": "right"}) as plain:
            wrong = await plain.get(f"{server.url}/v1/messages")
            assert wrong.status_code == 405 and wrong.json()["type"] == "error"
            other = await plain.get(f"{server.url}/v1/models")
            assert "request-id" not in other.headers and "x-request-id" in other.headers


async def test_what_the_template_does_not_read_is_named() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    body = {"messages": FOX, "max_tokens": 9, "thinking": thinking, "output_config": {"effort": "high"}}
    async with httpx2.AsyncClient(timeout=60) as plain:
        async with served(ScriptedRouter("hello")) as (_, server):
            answer = await plain.post(f"{server.url}/v1/messages", json=body)
            assert answer.headers["x-outrider-ignored"] == "thinking, thinking.budget_tokens, output_config.effort"
        async with served(ScriptedRouter("hello"), HttpConfig(port=0, unknown_fields="refuse")) as (_, server):
            for field in ("thinking", "output_config"):
                kept = {name: value for name, value in body.items() if name in ("messages", "max_tokens", field)}
                answer = await plain.post(f"{server.url}/v1/messages", json=kept)
                assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(field)


USER_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "x", "content": [USER_IMAGE]}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "max_tokens is null"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"messages": []}, "messages is 0 messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is unset"),
        ({"messages": [{"role": "ctx", "content": "x"}]}, "messages[0].role is ctx"),
        ({"messages": [{"role": "user", "content": [USER_IMAGE]}]}, "messages[0].content[0].type is image"),
        ({"messages": [{"role": "user", "content": [TOOL_RESULT]}]}, "messages[0].content[0].content[0].type is image"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type is unset"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is unset"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0] is 7"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content is 7"),
        ({"system": [USER_IMAGE]}, "system[0].type is image"),
        ({"tools": [SERVER_TOOL]}, "tools[0].type is web_search_20250305"),
        ({"tools": [{**LOOK, "name": ""}]}, "tools[0].name is"),
        ({"tools": [{**LOOK, "input_examples": [{}]}]}, "tools[0].input_examples is set"),
        ({"tools": [{**LOOK, "input_schema": {"type": "unheard"}}], "tool_choice": {"type": "any"}}, "tools[0].input_schema is"),
        ({"tools": [LOOK, LOOK]}, "tools is two of the name look"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is required"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name is unset"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "leap"}}, "tool_choice.name is leap"),
        ({"tools": [LOOK], "tool_choice": {"type": "auto", "name": "look"}}, "tool_choice.name is look"),
        ({"temperature": 1.5}, "temperature is 1.5"),
        ({"top_p": "x"}, "top_p is x"),
        ({"stop_sequences": [""]}, "stop_sequences is an empty text"),
        ({"stop_sequences": ["x"] * 40}, "stop_sequences is"),
        ({"thinking": {"type": "maybe"}}, "thinking.type is maybe"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "unheard"}}}}, "output_config.format.schema is"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management is set"),
        ({"container": "x"}, "container is x"),
        ({"thread": {"type": "create"}}, "thread is set"),
        ({"mcp_servers": [{}]}, "mcp_servers is set"),
        ({"stop": "x"}, "stop is x: must be unset: say stop_sequences"),
        ({"n": 2}, "n is 2"),
        ({"max_token": 2}, "did you mean max_tokens?"),
        ({"seed": "x"}, "seed is x"),
        ({"speculation": {"strategy": "x"}}, "speculation.strategy is x"),
        ({"messages": [*FOX, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}]},
         "messages[1].content is a tool_use"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: messages"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_named(both_entries: HttpService, body: dict[str, Any], says: str) -> None:
    answer = post(both_entries, **body)
    assert answer.status_code == 400, answer.text
    told = MessageErrorReply.model_validate(answer.json(), strict=True)
    assert told.error.type == "invalid_request_error" and says in told.error.message


def test_what_asks_for_nothing_is_no_error(both_entries: HttpService) -> None:
    said = {"type": "text", "text": "hi", "citations": [], "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [said]}, {"role": "assistant", "content": ""}]
    answer = post(
        both_entries, messages=messages, system="", tools=[], metadata={}, service_tier="auto", speed="standard", mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, container=None, stop_sequences=[],
        tool_choice={"type": "auto"}, cache_control={"type": "ephemeral"}, thinking={"type": "adaptive"}, output_config={},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert "x-outrider-ignored" not in answer.headers
