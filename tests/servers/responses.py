"""What the tests of the Responses API share: requests, whole and streamed, each checked against OpenAI's types."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.servers.http_service import HttpService
from tests.servers.openai_types import check_response, check_response_event, response_events_of

PATH = "/v1/responses"
CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
# One for all: making one takes longer than most calls.
CLIENT = httpx2.Client(timeout=60)


def ask(service: HttpService, **body: Any) -> httpx2.Response:
    return CLIENT.post(service.url + PATH, json=body)


def whole(service: HttpService, **body: Any) -> dict[str, Any]:
    answer = ask(service, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    check_response(found)
    return found


def stream(service: HttpService, **body: Any) -> list[dict[str, Any]]:
    answer = ask(service, **body, stream=True)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return checked(response_events_of(answer.text))


def checked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for event in events:
        check_response_event(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def chat(service: HttpService, messages: Any, **body: Any) -> dict[str, Any]:
    answer = CLIENT.post(service.url + CHAT, json={"messages": messages, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def without_names(response: dict[str, Any]) -> Any:
    """What two answers to the same request have in common."""
    kept = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at", "metrics", "usage")}
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**kept, "output": items}


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client makes of a stream's changes alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind, index = event["type"].removeprefix("response."), event.get("output_index", 0)
        if kind == "output_item.added":
            assert index == len(items)
            items.append({**event["item"], "content": list(event["item"].get("content", []))})
            continue
        if index < len(items) and "item_id" in event:
            assert event["item_id"] == items[index]["id"]
        if kind == "content_part.added":
            items[index]["content"].append(dict(event["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[index]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert items[index]["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert items[index]["arguments"] == event["arguments"]
        elif kind == "output_item.done":
            done, made = event["item"], items[index]
            assert made["id"] == done["id"] and made.get("arguments") == done.get("arguments")
            assert [part["text"] for part in made["content"]] == [part["text"] for part in done.get("content", [])]
            items[index] = done
    return items
