"""Checks answers against the types of OpenAI's own client: no field may be missing, of another type, or unknown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

# What vLLM's answers have beyond OpenAI's, and what is ours.
OURS = {
    ChatCompletion: {"metrics", "prompt_token_ids"},
    ChatCompletionChunk: {"metrics", "prompt_token_ids", "obfuscation"},
    Completion: {"metrics", "obfuscation"},
    Model: {"root", "parent", "max_model_len", "strategies", "default_strategy", "bit_exact"},
}
_OF_RESPONSES = {
    "seed", "stop_reason", "metrics", "store", "system_fingerprint", "token_ids", "prompt_token_ids", "speculation",
}  # fmt: skip
# Prediction's tokens.
_OF_USAGE = {"accepted_prediction_tokens", "rejected_prediction_tokens"}
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_OF_CHOICES = {"stop_reason", "seed", "token_ids", "prompt_token_ids", "speculation"}
_OF_MESSAGES = {"reasoning_content"}
_KINDS = {"chat.completion": ChatCompletion, "chat.completion.chunk": ChatCompletionChunk, "text_completion": Completion}


def check(raw: dict[str, Any]) -> BaseModel:
    """The answer, an object of OpenAI's types."""
    kind = _KINDS[raw["object"]]
    shown = json.loads(json.dumps(raw))
    for choice in shown["choices"]:
        # OpenAI's own streams of text completions have null here as well, which their type does not say.
        if kind is Completion and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
    found = kind.model_validate(shown, strict=True)
    unknown = {path: names for path, names in _extras(found, "") if names}
    assert set(unknown.pop("", set())) <= OURS[kind]
    for path, names in unknown.items():
        message = path.endswith((".message", ".delta"))
        assert path.startswith("choices") and names <= (_OF_MESSAGES if message else _OF_CHOICES), (path, names)
        assert message or path.count(".") == 0, (path, names)
    return found


def check_response(raw: dict[str, Any]) -> Response:
    """A response, an object of OpenAI's types."""
    found = Response.model_validate(json.loads(json.dumps(raw)), strict=True)
    _check_extras(found, "")
    return found


def check_response_event(raw: dict[str, Any]) -> Any:
    """An event of a response, an object of OpenAI's types."""
    found = _EVENT.validate_python(json.loads(json.dumps(raw)))
    assert type(found).model_fields["type"].annotation.__args__ == (raw["type"],)  # type: ignore[union-attr]
    _check_extras(found, "event")
    return found


def _check_extras(found: BaseModel, path: str) -> None:
    for place, names in _extras(found, path):
        # Probabilities in events have bytes as they have them elsewhere.
        ours = {"": _OF_RESPONSES, "event": {"obfuscation"}}.get(place, _OF_USAGE if "usage" in place else set())
        ours = _OF_RESPONSES if place == "event.response" else ours | {"bytes"} if "logprobs" in place else ours
        if place.endswith("item") or re.search(r"output\[\d+\]$", place):
            # OpenAI's calls of custom tools have it, which their type does not say.
            ours = ours | {"status"}
        assert names <= ours, (place, names)


def response_events_of(body: str) -> list[dict[str, Any]]:
    """The events of a response's stream; comments are left out."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def _extras(value: Any, path: str) -> Iterator[tuple[str, set[str]]]:
    if isinstance(value, BaseModel):
        yield path, set(value.model_extra or {})
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name), f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _extras(entry, f"{path}[{index}]")


def events_of(body: str) -> list[dict[str, Any]]:
    """The events of a stream that ended well; comments are left out."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]" and body.endswith("data: [DONE]\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
