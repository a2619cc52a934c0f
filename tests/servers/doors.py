"""The same question through every door: each asks in its own words, and says which tokens came back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

import outrider
from tests.servers.http_service import HttpService

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
# Of the HTTP doors: what they call a field of chats.
_MESSAGES_NAMES = {"stop": "stop_sequences"}
_RESPONSES_NAMES = {"max_tokens": "max_output_tokens"}
_CLIENT = httpx2.Client(timeout=60)


@dataclass(frozen=True, slots=True)
class Told:
    """One answer: its prompt's tokens, its own, and their log-probabilities where the door has them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A conversation, and how it is to be answered, in the words of chats."""

    conversation: tuple[Mapping[str, str], ...]
    sampling: Mapping[str, Any]
    choices: int = 1
    logprobs: bool = False

    def of_choice(self, index: int) -> dict[str, Any]:
        """The sampling by which a choice can be had alone."""
        seed = self.sampling.get("seed")
        return {**self.sampling, **({} if seed is None else {"seed": seed + index})}


Ask = Callable[[HttpService, Question, bool], list[Told]]


def post(service: HttpService, path: str, body: Mapping[str, Any]) -> httpx2.Response:
    return _CLIENT.post(service.url + path, json=body)


def _events(service: HttpService, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer = post(service, path, body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _whole(service: HttpService, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = post(service, path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def over_grpc(service: HttpService, question: Question, streamed: bool) -> list[Told]:
    found = []
    with outrider.Client(service.grpc) as client:
        for index in range(question.choices):
            own = dict(question.of_choice(index))
            if "logit_bias" in own:
                own["logit_bias"] = {int(key): value for key, value in own["logit_bias"].items()}
            # Where a request does not say, OpenAI's default holds over HTTP.
            own.setdefault("temperature", 1.0)
            more: dict[str, Any] = {"messages": list(question.conversation), **own}
            if question.logprobs:
                more["logprobs"] = 0
            answer = client.generate(**more)
            tokens = answer.token_ids
            if streamed:
                with client.stream(**more) as chunks:
                    tokens = tuple(id for chunk in chunks for id in chunk.token_ids)
            logprobs = tuple(entry.logprob for entry in answer.logprobs) if question.logprobs else None
            found.append(Told(answer.prompt_token_ids, tokens, logprobs))
    return found


def _openai(service: HttpService, path: str, body: dict[str, Any], question: Question, streamed: bool) -> list[Told]:
    asked = {**body, **question.sampling, "n": question.choices, "return_token_ids": True, "stream": streamed}
    answers = _events(service, path, asked) if streamed else [_whole(service, path, asked)]
    prompt: list[int] = []
    tokens: list[list[int]] = [[] for _ in range(question.choices)]
    logprobs: list[list[float]] = [[] for _ in range(question.choices)]
    for answer in answers:
        prompt = prompt or answer.get("prompt_token_ids", [])
        for choice in answer["choices"]:
            prompt = prompt or choice.get("prompt_token_ids", [])
            tokens[choice["index"]] += choice.get("token_ids", [])
            told = choice.get("logprobs") or {}
            logprobs[choice["index"]] += told.get("token_logprobs") or [
                each["logprob"] for each in told.get("content") or ()
            ]
    return [
        Told(tuple(prompt), tuple(ids), tuple(said) if question.logprobs else None)
        for ids, said in zip(tokens, logprobs, strict=True)
    ]


def over_chat(service: HttpService, question: Question, streamed: bool) -> list[Told]:
    own = {"logprobs": True, "top_logprobs": 0} if question.logprobs else {}
    return _openai(service, CHAT, {"messages": question.conversation, **own}, question, streamed)


def over_completions(service: HttpService, question: Question, streamed: bool) -> list[Told]:
    rendered = _whole(service, f"{CHAT}/render", {"messages": question.conversation})
    own: dict[str, Any] = {"logprobs": 0} if question.logprobs else {}
    return _openai(service, COMPLETIONS, {"prompt": rendered["token_ids"], **own}, question, streamed)


def over_messages(service: HttpService, question: Question, streamed: bool) -> list[Told]:
    system = [entry["content"] for entry in question.conversation if entry["role"] == "system"]
    turns = [entry for entry in question.conversation if entry["role"] != "system"]
    found = []
    for index in range(question.choices):
        own = {_MESSAGES_NAMES.get(name, name): value for name, value in question.of_choice(index).items()}
        body = {
            "messages": turns,
            **own,
            "return_token_ids": True,
            "stream": streamed,
            **({"system": system[0]} if system else {}),
        }
        if not streamed:
            whole = _whole(service, MESSAGES, body)
            found.append(Told(tuple(whole["prompt_token_ids"]), tuple(whole["token_ids"])))
            continue
        events = _events(service, MESSAGES, body)
        prompt = events[0]["message"]["prompt_token_ids"]
        found.append(Told(tuple(prompt), tuple(id for event in events for id in event.get("token_ids", ()))))
    return found


def over_responses(service: HttpService, question: Question, streamed: bool) -> list[Told]:
    found = []
    for index in range(question.choices):
        own = {_RESPONSES_NAMES.get(name, name): value for name, value in question.of_choice(index).items()}
        if question.logprobs:
            own["include"] = ["message.output_text.logprobs"]
        body = {"input": question.conversation, **own, "return_token_ids": True, "store": False, "stream": streamed}
        answer = _events(service, RESPONSES, body)[-1]["response"] if streamed else _whole(service, RESPONSES, body)
        parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        logprobs = tuple(each["logprob"] for part in parts for each in part.get("logprobs") or ())
        told = Told(tuple(answer["prompt_token_ids"]), tuple(answer["token_ids"]), logprobs if question.logprobs else None)
        found.append(told)
    return found


# A new door is one more line.
DOORS: dict[str, Ask] = {
    "gRPC": over_grpc,
    "chat": over_chat,
    "completions": over_completions,
    "messages": over_messages,
    "responses": over_responses,
}
