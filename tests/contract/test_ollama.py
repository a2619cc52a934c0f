"""Ollama's API: what a chat or a completion says, whole and in lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from services.api.config import HttpConfig
from services.api.http.ollama.protocol import (
    CalledWith,
    OllamaChatReply,
    OllamaGenerateReply,
    SaidCall,
    SaidMessage,
    ShownModel,
    Tags,
)
from services.api.http.ollama.reading import read_generate_body
from services.api.http.ollama.said_messages import chat_messages
from services.api.http.server import serve_http
from services.api.messages import ChatMessage, Infill
from speculation.errors import Unavailable
from tests.servers.http_service import HttpService
from tests.servers.scripted_router import ScriptedRouter

CLIENT = httpx2.Client(timeout=60)
FOX: list[Any] = [{"role": "user", "content": "fox"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    for name in ("look", "hear")
]
CALL = '{"name": "look", "arguments": {"a": 1}}'


def post(service: HttpService, path: str, **body: Any) -> httpx2.Response:
    return CLIENT.post(service.url + path, json=body)


def lines_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@asynccontextmanager
async def served(router: ScriptedRouter, config: HttpConfig | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    server = await serve_http(router, config or HttpConfig(port=0))
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            yield client
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.3}],
)
def test_a_conversation_goes_on_as_in_chats(both_entries: HttpService, options: dict[str, Any]) -> None:
    ours = {("repetition_penalty" if name == "repeat_penalty" else name): value for name, value in options.items()}
    chat = post(both_entries, "/v1/chat/completions", messages=FOX, max_tokens=12, **ours).json()
    text = chat["choices"][0]["message"]["content"]
    asked = {"model": "tiny:latest", "messages": FOX, "options": {**options, "num_predict": 12}}
    raw = post(both_entries, "/api/chat", **asked, stream=False).json()
    whole = OllamaChatReply.model_validate(raw, strict=True)
    assert (whole.message.content, whole.model, whole.done, whole.done_reason) == (text, "tiny:latest", True, "length")
    assert (whole.prompt_eval_count, whole.eval_count) == (chat["usage"]["prompt_tokens"], 12)
    lines = lines_of(post(both_entries, "/api/chat", **asked))
    for line in lines:
        OllamaChatReply.model_validate({name: value for name, value in line.items() if name != "obfuscation"}, strict=True)
    assert "".join(line["message"]["content"] for line in lines) == text
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["eval_count"] == 12


def test_a_prompt_is_a_conversation_or_raw(both_entries: HttpService) -> None:
    more = {"options": {"num_predict": 8, "temperature": 0}, "stream": False}
    own = {"max_tokens": 8, "temperature": 0}
    said = [{"role": "system", "content": "the"}, *FOX]
    chat = post(both_entries, "/v1/chat/completions", messages=said, **own).json()["choices"][0]["message"]["content"]
    told = post(both_entries, "/api/generate", prompt="fox", system="the", **more).json()
    assert OllamaGenerateReply.model_validate(told, strict=True).response == chat
    plain = post(both_entries, "/v1/completions", prompt="fox", **own).json()["choices"][0]["text"]
    assert post(both_entries, "/api/generate", prompt="fox", raw=True, **more).json()["response"] == plain
    lines = lines_of(post(both_entries, "/api/generate", prompt="fox", raw=True, options=more["options"]))
    assert "".join(line["response"] for line in lines) == plain


def test_events_are_as_long_as_others(both_entries: HttpService) -> None:
    answer = post(both_entries, "/api/chat", messages=FOX, options={"num_predict": 20, "temperature": 0})
    sizes = {len(line) for line in answer.content.splitlines(keepends=True)[:-1]}
    assert all(size % 256 == 0 for size in sizes), sizes


def test_an_answer_follows_a_schema(both_entries: HttpService) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    for path, asked in (("/api/chat", {"messages": FOX}), ("/api/generate", {"prompt": "fox"})):
        told = post(both_entries, path, **asked, format=schema, stream=False, options={"temperature": 0}).json()
        text = told["message"]["content"] if path == "/api/chat" else told["response"]
        assert json.loads(text) == {"a": 7} and told["done_reason"] == "stop"


def test_what_asks_for_nothing_changes_nothing(both_entries: HttpService) -> None:
    asked: dict[str, Any] = {"messages": FOX, "stream": False}
    options = {"num_predict": 8, "temperature": 1.0, "seed": 3}
    plain = post(both_entries, "/api/chat", **asked, options=options)
    nothing = {
        "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1, "typical_p": 1.0, "repeat_last_n": 64, "num_gpu": 1, "num_thread": 4,
        "num_keep": 4, "num_ctx": 8192, "use_mmap": True, "stop": [],
    }  # fmt: skip
    sent = post(
        both_entries, "/api/chat", **asked, options={**options, **nothing}, keep_alive="5m", format="", tools=[], think=False
    )
    assert sent.status_code == 200, sent.text
    assert sent.json()["message"] == plain.json()["message"]
    assert sent.headers["x-outrider-ignored"] == "options.typical_p, options.num_ctx, options.repeat_last_n"
    assert "x-outrider-ignored" not in plain.headers


def test_who_asks_for_nothing_asks_whether_the_model_is_loaded(both_entries: HttpService) -> None:
    told = post(both_entries, "/api/generate", model="tiny", keep_alive=-1).json()
    assert (told["response"], told["done"], told["done_reason"]) == ("", True, "load")
    told = post(both_entries, "/api/chat", model="tiny", messages=[]).json()
    assert (told["message"]["content"], told["done_reason"]) == ("", "load")
    assert post(both_entries, "/api/generate", model="nobody").status_code == 404


def test_models(both_entries: HttpService) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = Tags.model_validate(CLIENT.get(both_entries.url + path).json(), strict=True).models
        assert model.name == model.model == "tiny"
    for body in ({"model": "tiny"}, {"name": "tiny:latest"}, {}):
        shown = ShownModel.model_validate(post(both_entries, "/api/show", **body).json(), strict=True)
        assert "completion" in shown.capabilities and 512 in shown.model_info.values()
    assert post(both_entries, "/api/show", model="nobody").status_code == 404
    assert CLIENT.get(f"{both_entries.url}/api/version").json() == CLIENT.get(f"{both_entries.url}/version").json()


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_told_whole(stream: bool) -> None:
    text = f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL.replace('look', 'hear')}</tool_call>"
    async with served(ScriptedRouter(text)) as client:
        answer = await client.post("/api/chat", json={"messages": FOX, "tools": TOOLS, "stream": stream})
    lines = lines_of(answer) if stream else [answer.json()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [{"name": name, "arguments": {"a": 1}} for name in ("look", "hear")]
    assert "".join(line["message"]["content"] for line in lines).strip() == "I look."
    assert lines[-1]["done"] and lines[-1]["done_reason"] == "stop"


async def test_calls_come_back_with_their_answers() -> None:
    router = ScriptedRouter("ok")
    called = {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "look", "arguments": {"a": 1}}}, {"function": {"name": "hear", "arguments": {}}},
    ]}  # fmt: skip
    back = [*FOX, called, {"role": "tool", "tool_name": "hear", "content": "h"}, {"role": "tool", "content": "l"}]
    async with served(router) as client:
        assert (await client.post("/api/chat", json={"messages": back, "tools": TOOLS})).status_code == 200
        lost = await client.post("/api/chat", json={"messages": [*back, {"role": "tool", "content": "x"}], "tools": TOOLS})
        assert lost.status_code == 400 and "messages[4].tool_name" in lost.json()["error"]
    turns = [turn for turn in router.rendered[0].input if isinstance(turn, ChatMessage)]
    answered = [(turn.content, turn.tool_call_id) for turn in turns if turn.role == "tool"]
    assert answered == [("h", "call_1_1"), ("l", "call_1_0")]


def test_calls_are_found_by_their_ids_in_a_time_that_grows_as_they_do() -> None:
    count = 1000
    calls = [SaidCall(id=str(at), function=CalledWith(name="look")) for at in range(20 * count)]
    answers = [SaidMessage(role="tool", content="y", tool_call_id=call.id) for call in reversed(calls[-count:])]
    began = time.perf_counter()
    told = chat_messages([SaidMessage(role="assistant", tool_calls=calls), *answers])
    assert time.perf_counter() - began < 1.0
    assert [each["tool_call_id"] for each in told[1:]] == [call.id for call in reversed(calls[-count:])]


async def test_who_speaks_is_said_where_the_template_reads_it() -> None:
    said = {"messages": [{**FOX[0], "name": "ann"}], "stream": False}
    for roles, ignored in ((("user",), None), ((), "messages[].name")):
        router = ScriptedRouter("ok").with_card(named_roles=roles)
        async with served(router) as client:
            answer = await client.post("/api/chat", json=said)
        assert answer.headers.get("x-outrider-ignored") == ignored
        (turn,) = router.rendered[0].input
        assert isinstance(turn, ChatMessage) and turn.name == ("" if ignored else "ann")


def test_before_a_gap_there_may_be_nothing() -> None:
    asked = read_generate_body({"prompt": "", "suffix": "b"}).asked
    assert asked is not None and asked.inputs == ("",) and asked.infill == Infill(suffix="b")


@pytest.mark.parametrize("think", [True, False])
async def test_whether_the_model_thinks(think: bool) -> None:
    card = {"thoughts": "think", "template_options": ("enable_thinking",)}
    router = ScriptedRouter("<think>hm</think>ok").with_card(**card)
    async with served(router) as client:
        answer = (await client.post("/api/chat", json={"messages": FOX, "think": think, "stream": False})).json()
    assert answer["message"]["content"] == "ok"
    assert answer["message"].get("thinking") == ("hm" if think else None)
    assert json.loads(router.rendered[-1].chat.template_kwargs) == {"enable_thinking": think}


async def test_a_template_without_a_switch() -> None:
    async with served(ScriptedRouter("ok")) as client:
        told = await client.post("/api/chat", json={"messages": FOX, "think": True, "stream": False})
        assert told.headers["x-outrider-ignored"] == "think"
        high = await client.post("/api/chat", json={"messages": FOX, "think": "high", "stream": False})
        assert high.headers["x-outrider-ignored"] == "think"
        off = await client.post("/api/chat", json={"messages": FOX, "think": False, "stream": False})
        assert "x-outrider-ignored" not in off.headers
    async with served(ScriptedRouter("ok"), HttpConfig(port=0, unknown_fields="refuse")) as client:
        for asked in ({"think": True}, {"think": "high"}, {"options": {"num_ctx": 4096}}):
            refused = await client.post("/api/chat", json={"messages": FOX, **asked})
            assert refused.status_code == 400 and next(iter(asked)) in refused.json()["error"]


async def test_a_stream_that_fails_says_why() -> None:
    router = ScriptedRouter("some text")
    router.fails = (3, Unavailable("the verifier is gone"))
    async with served(router) as client:
        answer = await client.post("/api/chat", json={"messages": FOX})
    assert answer.status_code == 200
    assert lines_of(answer)[-1] == {"error": "the verifier is gone"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_name"),
        ("/api/chat", {"messages": FOX, "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"messages": FOX, "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ("/api/chat", {"messages": FOX, "options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"messages": FOX, "options": {"stop": ["x"] * 99}}, "options.stop"),
        ("/api/chat", {"messages": FOX, "options": {"stop": 5}}, "options.stop is 5"),
        ("/api/chat", {"messages": FOX, "format": 5}, "format is 5"),
        ("/api/chat", {"messages": FOX * 1025}, "messages is 1025 messages: must be 1 to 1024 messages"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name"),
        ("/api/chat", {"messages": FOX, "options": {"num_predict": 0}}, "options.num_predict"),
        ("/api/chat", {"messages": FOX, "options": {"num_predict": 100_000}}, "options.num_predict"),
        ("/api/chat", {"messages": FOX, "options": {"nothing": 1}}, "options.nothing"),
        ("/api/chat", {"messages": FOX, "temperature": 1}, "temperature"),
        ("/api/chat", {"messages": FOX, "format": "xml"}, "format"),
        ("/api/chat", {"messages": FOX, "format": {"type": "hiccup"}}, "format"),
        ("/api/chat", {"messages": FOX, "think": "none"}, "think"),
        ("/api/chat", {"messages": FOX, "truncate": True}, "truncate"),
        ("/api/chat", {"messages": FOX, "logprobs": True}, "logprobs"),
        ("/api/chat", {"messages": FOX, "model": "nobody"}, "model"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ("/api/generate", {"prompt": "a", "template": "b"}, "template"),
        ("/api/generate", {"prompt": "a", "context": [1, 2]}, "context"),
        ("/api/generate", {"prompt": "a", "images": ["b"]}, "images"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
        ("/api/generate", {"prompt": "a", "raw": True, "think": True}, "think"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/api/generate", {"prompt": 5}, "prompt"),
    ],
)
def test_what_is_refused_is_named(both_entries: HttpService, path: str, body: dict[str, Any], field: str) -> None:
    answer = post(both_entries, path, **body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json().keys() == {"error"} and answer.json()["error"].startswith(field), answer.text
