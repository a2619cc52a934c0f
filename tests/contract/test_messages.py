"""Anthropic's own client against /v1/messages: whole and streamed answers, calls of tools, counts, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message
from typing_extensions import override

from services.api.config import HttpConfig
from services.api.http import endpoints
from services.api.http.messages.replies import CountReply, MessageEvent, MessageReply
from services.api.http.server import HttpServer, serve_http
from services.api.messages import ChatMessage
from speculation.errors import Unavailable
from tests.servers.http_service import HttpService
from tests.servers.scripted_router import ScriptedRouter

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
    for drafted in (sources, raw["speculation"]["tokens"]):
        assert [each["id"] for each in drafted] == told.token_ids
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
        @override
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
        hidden = await client.messages.create(**asked, thinking={"type": "adaptive", "display": "omitted"})
        assert [block.type for block in hidden.content] == ["text"]
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
