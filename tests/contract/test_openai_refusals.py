"""What the HTTP API refuses: by name, with a status, a code and a sentence, and to the harm of nobody else."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.servers.http_service import HttpService

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FOX: list[Any] = [{"role": "user", "content": "fox"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
# One for all: making one takes longer than most calls.
CLIENT = httpx2.Client(timeout=60)

# What peers refuse where they should not, take and ignore, or take and get wrong: (fields of a chat, the field that is named).
IGNORED_ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "foo"),
    ({"temprature": 0.5}, "temprature"),
    ({"stream": True, "stream_options": {"include_usage": None}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"foo": True}}, "stream_options.foo"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}},
     "tool_choice.allowed_tools.mode"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}}},
     "tool_choice.allowed_tools.tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "hiccup"}}}], "tool_choice": "required"},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"functions": [TOOL["function"]]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"min_p": 1.5}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"fox": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": [[5, 1]]}, "logit_bias"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "hiccup"}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "x" * 70_000}}}},
     "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "\\"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": '{"minimum":1e999}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": '{"type": "string", "type": "integer"}'}}, "structured_outputs.json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "minimum": 10**400}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    ({"stream_options": {"foo": True}}, "stream_options.foo"),
    ({"top_p": -0.1}, "top_p"),
    ({"guided_json": {"type": "hiccup"}}, "guided_json"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"json_schema": {}}, "json_schema"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [9999]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]"),
    ({"bad_words": "fox"}, "bad_words"),
    ({"bad_words": [5]}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"priority": 0.5}, "priority"),
    ({"privacy": "loose"}, "privacy"),
    ({"privacy": "strict", "stream": True, "stream_options": {"include_obfuscation": False}},
     "stream_options.include_obfuscation"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"store": True}, "store"),
    ({"service_tier": "first"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
    ({"verbosity": "highest"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "response_format.json_schema"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"repeat_last_n": 64, "presence_penalty": 1}, "repeat_last_n"),
    ({"mirostat": 2}, "mirostat"),
    ({"typical_p": 0.9}, "typical_p"),
    ({"separate_reasoning": False}, "separate_reasoning"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"extra_body": {"a": 1}}, "extra_body"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"user": 5}, "user"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt": "x"}, "prompt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": "x" * 50_000}}, "prediction"),
    ({"prediction": {"type": "content", "content": "x"}, "speculation": {"strategy": "suffix"}}, "prediction"),
    ({"speculation": {"strategy": "magic"}}, "speculation.strategy"),
    ({"speculation": {"strategy": ""}}, "speculation.strategy"),
    ({"speculation": {"num_speculative_tokens": 513}}, "speculation.num_speculative_tokens"),
    ({"speculation": {"acceptance": "maybe"}}, "speculation.acceptance"),
    ({"speculation": {"report": "everything"}}, "speculation.report"),
    ({"speculation": {"report": ""}}, "speculation.report"),
    ({"speculation": {"foo": 1}}, "speculation.foo"),
    ({"speculation": "blend"}, "speculation"),
    ({"speculative.n_max": 5}, "speculative.n_max"),
    ({"model": "gpt-9"}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "fox"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["fox"]}, "messages[0]"),
    ({"messages": [{"content": "fox"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "fox"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "foo": 1}]}, "messages[0].foo"),
    ({"messages": [*FOX, {"role": "tool", "content": "a"}]}, "messages[1].tool_call_id"),
    ({"messages": [*FOX, {"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages[1].tool_calls[0].function"),
    ({"messages": [*FOX, {"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}]},
     "messages[1].tool_calls[0].function.name"),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}, *FOX]}, "messages[0].reasoning"),
    ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}, *FOX]}, "messages[0].refusal"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[1]"),
]  # fmt: skip

TEXT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [[5], "a"]}, "prompt[1]"),
    ({"prompt": [5, 4000]}, "prompt"),
    ({"prompt": [5, -1]}, "prompt[1]"),
    ({"prompt": ["a"] * 200}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"messages": FOX}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"n": 16, "prompt": ["a"] * 8, "max_tokens": 500}, "max_tokens"),
    ({"tools": [TOOL]}, "tools"),
]


def ask(service: HttpService, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return CLIENT.post(service.url + path, json=body, headers=headers)


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    """The error of an answer, which has all fields of OpenAI's and no others."""
    found: dict[str, Any] = answer.json()
    assert found.keys() == {"error"} and found["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    assert found["error"]["message"].isprintable()
    return dict(found["error"])


@pytest.mark.parametrize(("path", "body", "field"), [
    *[(CHAT, {"messages": FOX, **body}, field) for body, field in IGNORED_ELSEWHERE],
    *[(TEXT, {"prompt": "fox", **body}, field) for body, field in TEXT_ONLY],
], ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:60])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    both_entries: HttpService, path: str, body: dict[str, Any], field: str
) -> None:
    answer = ask(both_entries, path, body)
    error = error_of(answer)
    assert answer.status_code == (404 if field == "model" else 400), error
    assert error["param"] == field, error
    assert error["type"] == "invalid_request_error"
    assert error["code"] and error["message"].startswith(field)
    # The same before a stream begins: a status, not an event.
    if "stream_options" not in body:
        streamed = ask(both_entries, path, {**body, "stream": True})
        assert (streamed.status_code, error_of(streamed)) == (answer.status_code, error)


def test_there_are_enough_of_them() -> None:
    assert len(IGNORED_ELSEWHERE) >= 50


@pytest.mark.parametrize(
    ("field", "code"),
    [("foo", "unknown_parameter"), ("model", "model_not_found"), ("temperature", "invalid_type"), ("n", "invalid_value"),
     ("store", "unsupported_parameter"), ("max_tokens", "context_length_exceeded"), ("messages", "missing_required_parameter")],
)  # fmt: skip
def test_codes_are_openais(both_entries: HttpService, field: str, code: str) -> None:
    wrong: dict[str, Any] = {
        "foo": 1, "model": "x", "temperature": "warm", "n": 99, "store": True, "max_tokens": 9999, "messages": None,
    }  # fmt: skip
    assert error_of(ask(both_entries, CHAT, {"messages": FOX, field: wrong[field]}))["code"] == code


def test_a_prompt_that_is_too_long(both_entries: HttpService) -> None:
    for body in ({"prompt": "fox " * 1000}, {"prompt": [5] * 600}):
        error = error_of(ask(both_entries, TEXT, body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    error = error_of(ask(both_entries, CHAT, {"messages": [{"role": "user", "content": "fox " * 1000}]}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b"null", 400, "invalid_json"),
    (b'"text"', 400, "invalid_json"),
    (b"\xff\xfe{}", 400, "invalid_json"),
    (b'{"prompt": "\xff"}', 400, "invalid_json"),
    (b'{"prompt": "\\ud800"}', 400, "invalid_json"),
    (b'{"\\udfff": 1}', 400, "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json"),
    (b'{"prompt": "a", "temperature": -Infinity}', 400, "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, "invalid_value"),
    (b'{"prompt": "a", "metadata": {"a": [0, 1e999]}}', 400, "invalid_value"),
    ('{"prompt": "a"}'.encode("utf-16"), 400, "invalid_json"),
    ('{"prompt": "a"}'.encode("utf-16-le"), 400, "invalid_json"),
    ('{"prompt": "a"}'.encode("utf-32"), 400, "invalid_json"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
    (b'{"prompt": "a", "n": 1, "n": 2}', 400, "duplicate_parameter"),
    (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", 400, "invalid_json"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, "invalid_json"),
    (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413, "request_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), BODIES, ids=lambda value: repr(value)[:40])
def test_bodies_that_are_none(both_entries: HttpService, body: bytes, status: int, code: str) -> None:
    answer = CLIENT.post(both_entries.url + TEXT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


def test_infinite_numbers_are_refused_by_name(both_entries: HttpService) -> None:
    body = b'{"prompt": "a", "metadata": {"a": [0, {"b": -1e999}]}, "user": "1e999"}'
    error = error_of(CLIENT.post(both_entries.url + TEXT, content=body, headers={"content-type": "application/json"}))
    assert error["param"] == "metadata.a[1].b" and "-1e999" in error["message"]


def test_a_body_without_a_length_is_counted(both_entries: HttpService) -> None:
    pieces = (b" " * (1 << 20) for _ in range(6))
    answer = CLIENT.post(both_entries.url + TEXT, content=pieces, headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("POST", TEXT, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", TEXT, {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ("POST", TEXT, {"content-type": "application/json", "content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ("GET", TEXT, {}, 405, "method_not_supported"),
        ("POST", "/v1/models", {}, 405, "method_not_supported"),
        ("GET", "/v1/embeddings", {}, 404, "unknown_url"),
        ("GET", "/redoc", {}, 404, "unknown_url"),
        ("POST", f"{TEXT}?seed=5", {"content-type": "application/json"}, 400, "unknown_parameter"),
        ("GET", "/v1/models", {"host": "evil.example"}, 403, "unknown_host"),
        ("GET", "/health", {"host": "evil.example:8000"}, 403, "unknown_host"),
        ("GET", "/v1/models", {"x-request-id": "x" * 200}, 400, "invalid_value"),
    ],
)
def test_calls_that_are_none(
    both_entries: HttpService, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    answer = CLIENT.request(method, both_entries.url + path, headers=headers, content=b"{}" if method == "POST" else None)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers.get("allow") == ({TEXT: "POST", "/v1/models": "GET"}[path] if status == 405 else None)


def test_names_of_requests(both_entries: HttpService) -> None:
    body = {"prompt": "fox", "max_tokens": 1}
    named = ask(both_entries, TEXT, {**body, "request_id": "mine"})
    assert named.headers["x-request-id"] == "mine" and named.json()["id"] == "cmpl-mine"
    assert ask(both_entries, TEXT, body, **{"x-request-id": "yours"}).json()["id"] == "cmpl-yours"
    both = ask(both_entries, TEXT, {**body, "request_id": "mine"}, **{"x-request-id": "yours"})
    assert error_of(both)["param"] == "request_id"
    # Also where it fails.
    assert ask(both_entries, TEXT, {}, **{"x-request-id": "yours"}).headers["x-request-id"] == "yours"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": FOX}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "foo": 1}, "foo"),
        ("/tokenize", {"prompt": [1], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": [1], "foo": 1}, "foo"),
    ],
)
def test_tokens_that_are_none(both_entries: HttpService, path: str, body: dict[str, Any], field: str) -> None:
    assert error_of(ask(both_entries, path, body))["param"] == field


def test_nothing_was_harmed(both_entries: HttpService) -> None:
    answer = ask(both_entries, TEXT, {"prompt": "fox", "max_tokens": 4, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 4
    card = both_entries.run(both_entries.pipeline.verifier.describe())
    assert card.free_blocks == card.total_blocks and card.running == card.waiting == 0
