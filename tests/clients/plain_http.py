"""The same request again over plain HTTP, whole: what a client's user should have got."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.clients.recorder import Asked

_STREAMED = ("stream", "stream_options")
_CLIENT = httpx2.Client(timeout=300, trust_env=False)


@dataclass(frozen=True)
class Plain:
    """An answer: its text, and the calls in it as a user has them."""

    text: str
    calls: list[dict[str, Any]]


def ask_again(server: str, asked: Asked) -> Plain:
    """The server's own answer to a request of a client, with the seed of the first answer.

    Raises:
        AssertionError: the server refuses it.
    """
    body = {name: value for name, value in asked.body.items() if name not in _STREAMED}
    if asked.seed is not None and asked.body.get("temperature") != 0:
        body["seed"] = asked.seed
    # Unset, Ollama's answers are streamed.
    answer = _CLIENT.post(server + asked.path, json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    return _READ[asked.path](answer.json())


def _of_chat(answer: dict[str, Any]) -> Plain:
    message = answer["choices"][0]["message"]
    calls = [each["function"] for each in message.get("tool_calls") or []]
    return Plain(message["content"] or "", [_call(each["name"], each["arguments"]) for each in calls])


def _of_completion(answer: dict[str, Any]) -> Plain:
    return Plain(answer["choices"][0]["text"], [])


def _of_message(answer: dict[str, Any]) -> Plain:
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    return Plain(text, [{"name": each["name"], "arguments": each["input"]} for each in calls])


def _of_response(answer: dict[str, Any]) -> Plain:
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return Plain("".join(part["text"] for part in parts), [_call(each["name"], each["arguments"]) for each in calls])


def _of_ollama(answer: dict[str, Any]) -> Plain:
    message = answer["message"]
    return Plain(message["content"], [each["function"] for each in message.get("tool_calls", [])])


_READ = {
    "/api/chat": _of_ollama,
    "/v1/chat/completions": _of_chat,
    "/v1/completions": _of_completion,
    "/v1/messages": _of_message,
    "/v1/responses": _of_response,
}


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"name": name, "arguments": json.loads(arguments)}
