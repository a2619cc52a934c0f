"""Reads Ollama's bodies: each becomes the body of a chat or a completion that says the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from services.api.http.declared import read_declared
from services.api.http.ollama.protocol import (
    AS_MESSAGES,
    HINTS,
    LEFT_OUT,
    OF_THE_MODEL,
    TEXT_ALONE,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    Options,
)
from services.api.http.ollama.said_messages import chat_messages, check_unset
from services.api.http.openai.chat_options import with_thinking
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.errors import Refused, shown
from services.api.http.openai.other_servers import asks_for_nothing, counts_left_out
from services.api.http.openai.request import Asked
from services.api.model_card import ModelCard
from speculation import limits
from speculation.errors import InvalidArgument

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_SHARED = ("model", "speculation", "privacy", "cache_salt")
_NAMES = {
    **{name: f"options.{name}" for name in _SAMPLING},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "reasoning_effort": "think",
    "response_format": "format",
}
_LATEST = ":latest"
_LENGTHS = ("low", "medium", "high", "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedOllama:
    """A request.

    Attributes:
        model: by the name that it says.
        asked: what the body of the same chat or completion asks for; None: whether the model is loaded.
        think: whether the model thinks first, where the request says so.
        unread: fields that have no effect.
    """

    model: str | None
    asked: Asked | None
    think: bool | None = None
    unread: tuple[str, ...] = ()


def read_chat_body(body: dict[str, Any]) -> AskedOllama:
    """What a body of /api/chat asks for.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    given = _read(OllamaChatBody, body)
    if not given.messages:
        return AskedOllama(model=given.model, asked=None)
    if len(given.messages) > limits.MAX_MESSAGES:
        raise Refused("messages", f"{len(given.messages)} messages", f"1 to {limits.MAX_MESSAGES} messages")
    messages = chat_messages(given.messages)
    more = {"tools": given.tools or None}
    if given.messages[-1].role == "assistant":
        more["continue_final_message"] = True
    return _asked(given, messages, more)


def read_generate_body(body: dict[str, Any]) -> AskedOllama:
    """What a body of /api/generate asks for.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    given = _read(OllamaGenerateBody, body)
    for name, allowed in (("template", OF_THE_MODEL), ("context", AS_MESSAGES), ("images", TEXT_ALONE)):
        check_unset(name, getattr(given, name), allowed)
    if not given.prompt and not given.suffix:
        return AskedOllama(model=given.model, asked=None)
    if not given.raw and not given.suffix:
        said = [{"role": "system", "content": given.system}] if given.system else []
        return _asked(given, [*said, {"role": "user", "content": given.prompt}], {})
    for name in ("system", "think"):
        if getattr(given, name):
            raise Refused(name, getattr(given, name), "unset where raw or suffix is set: there is no chat template")
    completion, left_out = _shared(given)
    with naming():
        # Before a gap there may be nothing.
        asked = read_completion({**completion, "prompt": given.prompt or "-", "suffix": given.suffix or None})
        asked = replace(asked, inputs=(given.prompt,))
    return AskedOllama(model=given.model, asked=_finished(asked, left_out))


def fitted(request: AskedOllama, card: ModelCard, *, strict: bool) -> AskedOllama:
    """The request as the model's chat template reads it.

    Args:
        strict: what it does not read is refused, not left out.

    Raises:
        Refused: that is so; names the field.
    """
    if request.asked is None or request.think is None:
        return request
    chat = with_thinking(request.asked.chat, card, request.think)
    if chat is not None:
        return replace(request, asked=replace(request.asked, chat=chat))
    if not request.think and not card.thoughts:
        return request
    if strict:
        allowed = "unset: this model's chat template does not read it (server.unknown_fields)"
        raise Refused("think", request.think, allowed)
    return replace(request, unread=("think",))


def known_name(name: str | None, card: ModelCard) -> str | None:
    """A model's name as it is served: Ollama's clients may have put ``:latest`` behind it."""
    known = {card.name, *card.aliases, *card.adapters}
    bare = None if name is None else name.removesuffix(_LATEST)
    return bare if name not in known and bare in known else name


def own_name(field: str) -> str:
    """What Ollama calls a field of a chat or a completion."""
    return _NAMES.get(field) or _NAMES.get(field.split(".")[0], field)


@contextmanager
def naming() -> Iterator[None]:
    """Errors within name the fields as Ollama does."""
    try:
        yield
    except InvalidArgument as error:
        name = own_name(error.field)
        if isinstance(error, Refused):
            raise Refused(name, error.value, error.allowed, error.code) from error
        raise type(error)(name, error.value, error.allowed) from error


def _read(kind: Any, body: Mapping[str, Any]) -> Any:
    kept = {
        name: value
        for name, value in body.items()
        if value is not None and (name in kind.model_fields or name not in HINTS or not asks_for_nothing(name, value, body))
    }
    return read_declared(kind, kept, hints=HINTS)


def _asked(given: OllamaBody, messages: list[dict[str, Any]], more: Mapping[str, Any]) -> AskedOllama:
    chat, left_out = _shared(given)
    if not isinstance(given.think, bool | None) and given.think not in _LENGTHS:
        raise Refused("think", given.think, f"true, false, or one of {', '.join(_LENGTHS)}")
    if isinstance(given.think, str):
        chat["reasoning_effort"] = given.think
    body = {**chat, **more, "messages": messages}
    with naming():
        asked = read_chat({name: value for name, value in body.items() if value is not None})
    think = given.think if isinstance(given.think, bool) else None
    asked = replace(_finished(asked, left_out), thoughts=given.think is not False)
    return AskedOllama(model=given.model, asked=asked, think=think)


def _shared(given: OllamaBody) -> tuple[dict[str, Any], tuple[Refused, ...]]:
    """What chats and completions have alike, and what is left out."""
    said = given.options or {}
    ours = {**said, "repetition_penalty": said.get("repeat_penalty")}
    counts = counts_left_out(ours)
    kept = {
        name: value
        for name, value in said.items()
        if value is not None
        and name not in counts
        and (name in Options.model_fields or name not in HINTS or not asks_for_nothing(name, value, ours))
    }
    hints = {f"options.{name}": hint for name, hint in HINTS.items()}
    options = read_declared(Options, kept, "options", hints)
    body: dict[str, Any] = {name: getattr(given, name) for name in _SHARED}
    body |= {name: getattr(options, name) for name in _SAMPLING}
    length = options.num_predict
    if length == 0:
        raise Refused("options.num_predict", 0, "a number of tokens, or -1")
    body |= {
        "max_tokens": length if length is not None and length > 0 else None,
        "repetition_penalty": options.repeat_penalty,
    }
    if options.stop == []:
        body["stop"] = None
    # Unset, Ollama's answers are streamed.
    body["stream"] = given.stream is not False
    if given.format:
        if not isinstance(given.format, dict) and given.format != "json":
            raise Refused("format", shown(given.format), "json, or a JSON schema")
        form: dict[str, Any] = {"type": "json_object"}
        if isinstance(given.format, dict):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.format}}
        body["response_format"] = form
    left_out = {name: value for name in LEFT_OUT if (value := getattr(options, name)) is not None} | counts
    refused = tuple(
        Refused(f"options.{name}", shown(value), LEFT_OUT.get(name) or HINTS[name], "unsupported_parameter")
        for name, value in left_out.items()
    )
    return {name: value for name, value in body.items() if value is not None}, refused


def _finished(asked: Asked, left_out: tuple[Refused, ...]) -> Asked:
    return replace(asked, left_out=(*asked.left_out, *left_out), default_max_tokens=None)
