"""What Anthropic's API refuses, by name and in that API's own shape."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic

from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.messages.replies import MessageErrorReply
from speculation.errors import ResourceExhausted
from tests.contract.test_messages import FOX, LOOK, post, served
from tests.servers.http_service import HttpService
from tests.servers.scripted_router import ScriptedRouter


async def test_errors_have_anthropics_shape() -> None:
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
            assert answer.headers["x-outrider-ignored"] == "thinking, output_config.effort, thinking.budget_tokens"
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
        diagnostics={"previous_message_id": None}, fallback_credit_token=None, billing_policy=None,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert "x-outrider-ignored" not in answer.headers
