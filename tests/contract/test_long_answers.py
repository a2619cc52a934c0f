"""An answer of many tokens that is sent as a whole is read and spelt a part at a time: others have their turns meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator
from typing import Any

import httpx2
import pytest

from services import in_turns
from services.api.config import HttpConfig
from services.api.http import written_json
from services.api.http.messages.answer import MessageAnswer
from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.chat_answer import ChatAnswer
from services.api.http.openai.completion_answer import CompletionAnswer
from services.api.http.openai.logprobs import Speller
from services.api.http.openai.prompt_scores import echoed_logprobs
from services.api.http.responses.response_answer import ResponseAnswer
from services.api.http.responses.response_object import ResponseObject
from services.api.http.server import serve_http
from services.api.http.written_json import write, written
from tests.running.patience import PATIENCE_S
from tests.servers.scripted_router import ScriptedRouter

TOKENS = 2000
TALK = [{"role": "user", "content": "x"}]
ASKED: dict[type[AnswerInProgress], tuple[str, dict[str, Any]]] = {
    ChatAnswer: ("/v1/chat/completions", {"messages": TALK, "logprobs": True, "top_logprobs": 1}),
    CompletionAnswer: ("/v1/completions", {"prompt": "x", "logprobs": 1}),
    ResponseAnswer: ("/v1/responses", {"input": "x"}),
    MessageAnswer: ("/v1/messages", {"messages": TALK, "max_tokens": 4000}),
}


class _Turns:
    """Awaits something, and counts how often that gives its turn away."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        while True:
            try:
                told = next(steps)
            except StopIteration as ended:
                return ended.value
            self.count += 1
            yield told


def counted(whole: Callable[[Any], Any], found: list[int]) -> Callable[[Any], Any]:
    async def counting(self: AnswerInProgress) -> dict[str, Any]:
        turns = _Turns(whole(self))
        told: dict[str, Any] = await turns
        found.append(turns.count)
        return told

    return counting


def text_of(body: dict[str, Any]) -> str:
    if "choices" in body:
        choice = body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    listed = body.get("output", [body])[0]["content"]
    return str(listed[0]["text"])


@pytest.mark.parametrize("form", ASKED, ids=lambda form: form.__name__)
async def test_others_have_their_turns(form: type[AnswerInProgress], monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    monkeypatch.setattr(form, "whole", counted(form.whole, turns))
    said = "".join(chr(97 + n % 26) for n in range(TOKENS))
    server = await serve_http(ScriptedRouter(said), HttpConfig(port=0))
    path, body = ASKED[form]
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            first = (await client.post(path, json={"model": "scripted", **body})).json()
            # At once, as short answers are: the same.
            monkeypatch.setattr(in_turns, "AT_ONCE", 10 * TOKENS)
            again = (await client.post(path, json={"model": "scripted", **body})).json()
    finally:
        await server.stop(0)
    assert text_of(first) == text_of(again) == said
    assert turns[0] >= TOKENS // 128 - 1 > turns[1] + 5
    if form in (ChatAnswer, CompletionAnswer):
        assert first["choices"][0]["logprobs"] == again["choices"][0]["logprobs"]


async def test_others_have_their_turns_while_a_prompt_is_echoed() -> None:
    text = "fox " * (TOKENS // 4)
    told = _Turns(echoed_logprobs(text.encode(), (), text, 0, Speller(ScriptedRouter(), as_ids=False), named=False))
    form = await told
    assert "".join(form["tokens"]) == text and form["text_offset"] == [*range(TOKENS)]
    assert told.count >= TOKENS // 128 - 1


async def test_what_is_told_of_drafts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await serve_http(ScriptedRouter("fox " * 100), HttpConfig(port=0))
    found = []
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            for at_once in (7, 10_000):
                monkeypatch.setattr(in_turns, "AT_ONCE", at_once)
                asked = {"messages": TALK, "speculation": {"report": "trees"}, "return_token_ids": True, "seed": 1}
                found.append((await client.post("/v1/chat/completions", json=asked)).json()["choices"][0])
    finally:
        await server.stop(0)
    assert found[0] == found[1] and len(found[0]["token_ids"]) == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("asked", [{"top_logprobs": 1}, {"speculation": {"report": "trees"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_long_is_written_at_once(
    path: str, asked: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread neither: ``json`` and pydantic keep the interpreter's lock while they write."""
    at_once: list[int] = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*given: Any, **named: Any) -> Any:
            told = work(*given, **named)
            at_once.append(len(str(told)))
            return told

        return noting

    monkeypatch.setattr(ResponseObject, "model_dump", noted(ResponseObject.model_dump))
    monkeypatch.setattr(json, "dumps", noted(json.dumps))
    server = await serve_http(ScriptedRouter("a" * TOKENS), HttpConfig(port=0))
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            chat = {"messages": TALK, "logprobs": "top_logprobs" in asked} if "chat" in path else {"input": "x"}
            body = {"model": "scripted", "stream": stream, "stream_interval": 50, **chat, **asked}
            answer = await client.post(path, json=body)
            assert answer.status_code == 200
    finally:
        await server.stop(0)
    assert len(answer.content) > 30 * TOKENS and max(at_once) < 20 * TOKENS


@pytest.mark.parametrize("seed", range(20))
async def test_parts_make_the_same_json(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)

    def some(levels: int) -> Any:
        if levels == 0:
            return rng.choice([None, True, 1, -0.5, "", 'ü"\n\ud7ff', [], {}])
        entries = [some(rng.randrange(levels)) for _ in range(rng.randrange(7))]
        return rng.choice([list, tuple, lambda each: {f'"{n}': one for n, one in enumerate(each)}])(entries)

    content = {"all": [some(5) for _ in range(20)], "": some(5), "1": some(0)}
    whole = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    for at_once in (1, 2, 5, 40, 10_000):
        monkeypatch.setattr(written_json, "AT_ONCE", at_once)
        assert written(content) == await write(content) == whole
