"""What the Responses API refuses: by the name that the field has there, and never with a status of 500."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.servers import malformed_http
from tests.servers.http_service import HttpService
from tests.servers.responses import CLIENT, PATH, ask

LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
FOX: dict[str, Any] = {"role": "user", "content": "fox"}
FORM: dict[str, Any] = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}


def message(part: Any) -> dict[str, Any]:
    return {"input": [FOX, {"role": "user", "content": [{"type": "input_text", "text": "a"}, part]}]}


# (fields of a body, the field that is named)
REFUSED: list[tuple[dict[str, Any], str]] = [
    # What is not there.
    ({"background": True}, "background"),
    ({"background_options": {"completion_window": "2h"}}, "background_options"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"image": {"context_compression": "auto"}}, "image"),
    ({"access_programs": {"cyber": "standard"}}, "access_programs"),
    ({"prompt_cache_options": "explicit"}, "prompt_cache_options"),
    ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
    ({"service_tier": "first"}, "service_tier"),
    ({"truncation": "some"}, "truncation"),
    ({"truncation": "auto", "input": [FOX, {"role": "user", "content": "fox " * 600}]}, "input"),
    ({"n": 2}, "n"),
    *[({"tools": [{"type": kind}]}, "tools[0].type") for kind in (
        "web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use_preview", "mcp", "image_generation",
        "local_shell", "shell", "apply_patch", "tool_search", "anything")],
    *[({"tools": [LOOK], "tool_choice": {"type": kind}}, "tool_choice.type") for kind in ("web_search_preview", "mcp")],
    *[({"input": [FOX, {"type": kind}]}, "input[1].type") for kind in (
        "computer_call", "computer_call_output", "web_search_call", "file_search_call", "code_interpreter_call", "mcp_call",
        "image_generation_call", "local_shell_call", "tool_search_call", "compaction")],
    *[(message({"type": kind}), "input[1].content[1].type") for kind in ("input_image", "input_file", "input_audio", "refusal")],
    ({"include": ["everything"]}, "include[0]"),
    ({"reasoning": {"summary": "short"}}, "reasoning.summary"),
    ({"text": {"verbosity": "lowest"}}, "text.verbosity"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    # What is called otherwise.
    ({"messages": [FOX]}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"logprobs": True}, "logprobs"),
    ({"temprature": 0.5}, "temprature"),
    ({"strategy": "auto"}, "strategy"),
    # What is wrong.
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"input": ["fox"]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": "a", "mood": "good"}]}, "input[0].mood"),
    (message({"type": "input_text"}), "input[1].content[1].text"),
    (message({"type": "input_text", "text": "a", "mood": 1}), "input[1].content[1].mood"),
    ({"input": [FOX, {**CALL, "arguments": {}}]}, "input[1].arguments"),
    ({"input": [FOX, {**CALL, "name": ""}]}, "input[1].name"),
    ({"input": [FOX, {**CALL, "name": "x" * 300}]}, "input[1].name"),
    ({"input": [FOX, {"type": "message", "role": "assistant", "content": "a"}, {**CALL, "call_id": "x" * 300}]}, "input[2].call_id"),
    ({"input": [FOX, CALL, {"type": "function_call_output", "call_id": "c"}]}, "input[2].output"),
    ({"input": [FOX, CALL, {"type": "function_call_output", "call_id": "x" * 300, "output": "a"}]}, "input[2].call_id"),
    ({"input": [FOX, CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
     "input[2].output[0].type"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": "msg_unknown"}]}, "input[0].id"),
    ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"instructions": ["a"]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": True}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [5]}, "stop"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": -1}, "top_logprobs"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"store": "yes"}, "store"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"mood": 1}}, "stream_options.mood"),
    ({"model": "gpt-9"}, "model"),
    ({"model": 5}, "model"),
    ({"text": "json"}, "text"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {**FORM, "schema": {"type": "hiccup"}}}}, "text.format.schema"),
    ({"text": {"format": {**FORM, "mood": 1}}}, "text.format.mood"),
    ({"text": {"mood": 1}}, "text.mood"),
    ({"text": {"format": FORM}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"tools": "look"}, "tools"),
    ({"tools": ["look"]}, "tools[0]"),
    ({"tools": [LOOK, LOOK]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{**LOOK, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**LOOK, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{**LOOK, "strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools[0].name"),
    ({"tools": [{**LOOK, "parameters": {"type": "hiccup"}}], "tool_choice": "required"}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [LOOK], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode"),
    ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}},
     "tool_choice.tools[0].name"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"speculation": {"strategy": "magic"}}, "speculation.strategy"),
    ({"speculation": {"mood": 1}}, "speculation.mood"),
    ({"privacy": "some"}, "privacy"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": "a\n"}, "request_id"),
    ({"input": "fox " * 600}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[f"{index} {field}" for index, (_, field) in enumerate(REFUSED)])
def test_what_is_refused_is_named(both_entries: HttpService, body: dict[str, Any], field: str) -> None:
    text = json.dumps({"input": "fox", **body})
    answer = CLIENT.post(both_entries.url + PATH, content=text, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if error["code"] == "model_not_found" else 400, field), error
    assert error["message"].startswith(field.split("[")[0].split(".")[0]) and ": must be " in error["message"]
    # Nothing is said of the chat that it is made into.
    assert not any(
        word in error["message"].removeprefix(field)
        for word in ("messages[", "max_completion_tokens", "response_format.", ".function.")
    )


def test_a_body_that_is_none(both_entries: HttpService) -> None:
    for text, field in ((b"[]", "body"), (b"{}", "input"), (b'{"input": 1e999}', "input")):
        answer = CLIENT.post(both_entries.url + PATH, content=text, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    limit = ask(both_entries, input=[FOX] * 1025).json()["error"]
    assert (limit["param"], limit["message"]) == ("input", "input is 1025 items: must be 1 to 1024 items")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", PATH, 405),
        ("POST", f"{PATH}/resp_x", 405),
        ("PUT", f"{PATH}/resp_x", 405),
        ("GET", f"{PATH}/resp_x/cancel", 405),
        ("GET", f"{PATH}/", 404),
        ("GET", f"{PATH}//input_items", 404),
        ("POST", f"{PATH}/cancel", 404),
        ("DELETE", f"{PATH}/%00", 404),
        ("GET", f"{PATH}/{'x' * 3000}", 404),
        ("GET", f"{PATH}/resp_x?stream=true", 400),
        ("DELETE", f"{PATH}/resp_x?max_output_tokens=5", 400),
    ],
)
def test_calls_that_are_none(both_entries: HttpService, method: str, path: str, status: int) -> None:
    answer = CLIENT.request(method, both_entries.url + path, headers={"content-type": "application/json"}, content=b"{}")
    assert answer.status_code == status and answer.json()["error"]["message"]


SEEDS = 60


def _mutated(value: Any, source: random.Random) -> Any:
    """A value with something wrong at a random place in it."""
    if isinstance(value, dict) and value and source.random() < 0.8:
        key = source.choice(list(value))
        if source.random() < 0.15:
            return {name: each for name, each in value.items() if name != key}
        if source.random() < 0.15:
            return {**value, source.choice(("mood", "id", "type", "role", "content")): source.choice(malformed_http.VALUES)}
        return {**value, key: _mutated(value[key], source)}
    if isinstance(value, list) and value and source.random() < 0.8:
        index = source.randrange(len(value))
        return [*value[:index], _mutated(value[index], source), *value[index + source.randrange(2) :]]
    return source.choice(malformed_http.VALUES)


def test_nothing_a_client_sends_is_our_failure(both_entries: HttpService) -> None:
    source, seen = random.Random(4), set()
    good: dict[str, Any] = {
        "input": [
            FOX, {"type": "reasoning", "summary": [], "content": []}, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            CALL, {"type": "function_call_output", "call_id": "c", "output": "b"}, {"role": "developer", "content": "c"},
        ],
        "instructions": "d", "max_output_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_logprobs": 1, "include": ["message.output_text.logprobs"],
        "text": {"format": FORM, "verbosity": "medium"}, "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"},
        "tools": [LOOK], "tool_choice": "none", "stream": False, "stream_options": {"include_obfuscation": True}, "store": True,
        "seed": 1, "logit_bias": {"5": 1}, "stop": ["x"], "speculation": {"strategy": "auto"}, "user": "u",
    }  # fmt: skip
    for _ in range(SEEDS):
        body = good
        for _ in range(source.randint(0, 3)):
            body = _mutated(body, source)
            body = body if isinstance(body, dict) else {"input": body}
        text = json.dumps(body)
        answer = CLIENT.post(both_entries.url + PATH, content=text, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (answer.text, text)
        assert answer.status_code == 200 or answer.json()["error"]["param"], text
        seen.add(answer.status_code)
    assert {200, 400} <= seen
