"""Makes the body of a chat of a body of the Responses API; the rules of chats then say what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.api.http.declared import read_declared
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.errors import Refused
from services.api.http.openai.late_system import as_users_text
from services.api.http.openai.request import Asked
from services.api.http.responses.conversation import Item, ItemsAsChat, read_reference
from services.api.http.responses.own_names import OwnNames
from services.api.http.responses.protocol import AS_IN_CHAT, LOGPROBS, CreateResponse
from services.api.http.responses.tool_names import ToolName
from services.api.http.responses.tools import ChatTools, chosen, read_tools
from services.api.http.responses.unserved import HINTS, check_unserved
from services.api.http.written_json import written
from services.api.messages import ChatMessage
from services.api.model_card import ModelCard
from speculation import limits
from speculation.errors import InvalidArgument

_PREVIOUS = "previous_response_id"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewResponse:
    """A body that has been read.

    Attributes:
        own: the items of ``input``.
        references: ids of the stored items that some of them stand for.
    """

    body: CreateResponse
    own: list[Item]
    references: tuple[str, ...]

    @property
    def needs_stored(self) -> bool:
        """Whether it builds on stored responses."""
        return self.body.previous_response_id is not None or bool(self.references)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedResponse:
    """What a body asks for.

    Attributes:
        context: all items that the model is shown, as JSON.
        names: of the chat's fields in the body.
        called: what the body calls the chat's functions.
    """

    body: CreateResponse
    asked: Asked
    context: bytes
    names: OwnNames
    called: Mapping[str, ToolName]


def read_create(content: dict[str, Any]) -> NewResponse:
    """The body of POST /v1/responses, as far as it can be read without what is stored.

    Raises:
        Refused: a field is wrong, missing, unknown or not served; names it.
    """
    given = check_unserved(content)
    body = read_declared(CreateResponse, given, hints=HINTS)
    own = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not isinstance(own, list):
        raise Refused("input", own, "a text, or a list of items", "invalid_type")
    if not 1 <= len(own) <= limits.MAX_MESSAGES:
        raise Refused("input", f"{len(own)} items", f"1 to {limits.MAX_MESSAGES} items")
    for index, item in enumerate(own):
        if not isinstance(item, dict):
            raise Refused(f"input[{index}]", item, "an object", "invalid_type")
    found = (read_reference(item, f"input[{index}]") for index, item in enumerate(own))
    return NewResponse(body=body, own=own, references=tuple(dict.fromkeys(each for each in found if each is not None)))


def ask(new: NewResponse, before: Sequence[Item], stored: Callable[[str], Item | None]) -> AskedResponse:
    """What a body asks for.

    Args:
        before: the items of the conversation that it continues.
        stored: the item of an id; None: there is none.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    body, conversation = new.body, ItemsAsChat()
    # A text has no items to name.
    paths = ["input"] if isinstance(body.input, str) else [f"input[{index}]" for index in range(len(new.own))]
    own = [_resolved(item, path, stored) for item, path in zip(new.own, paths, strict=True)]
    if body.instructions:
        conversation.instruct(body.instructions)
    conversation.add((item, _PREVIOUS) for item in before)
    conversation.add(zip(own, paths, strict=True))
    names = conversation.names
    tools = ChatTools() if body.tools is None else read_tools(body.tools, names)
    try:
        asked = read_chat(_chat_of(body, conversation.messages, tools))
    except InvalidArgument as error:
        raise names.told(error) from error
    asked = replace(
        asked,
        length_field="max_completion_tokens",
        drops_oldest=body.truncation == "auto",
        left_out=(*asked.left_out, *tools.left_out),
    )
    return AskedResponse(body=body, asked=asked, context=_context(before, own), names=names, called=tools.called)


def fitted(wanted: AskedResponse, card: ModelCard) -> AskedResponse:
    """What is asked for as the model's chat template takes it: one system message, where it takes no more.

    A body has more of them as a rule: its instructions, and a developer's messages.
    """
    turns = tuple(each for each in wanted.asked.inputs[0] if isinstance(each, ChatMessage))
    if card.late_system or not any(each.role == "system" for each in turns[1:]):
        return wanted
    conversation, places = as_users_text(turns, range(len(turns)))
    return replace(wanted, asked=replace(wanted.asked, inputs=(conversation,)), names=wanted.names.moved(places))


def _resolved(item: Item, path: str, stored: Callable[[str], Item | None]) -> Item:
    name = read_reference(item, path)
    if name is None:
        return item
    if (found := stored(name)) is None:
        raise Refused(f"{path}.id", name, "the id of an item of a stored response of this API key", "item_not_found")
    return found


def _chat_of(body: CreateResponse, messages: list[dict[str, Any]], tools: ChatTools) -> dict[str, Any]:
    chat = {name: value for name in AS_IN_CHAT if (value := getattr(body, name)) is not None}
    chat |= {"messages": messages, "max_completion_tokens": body.max_output_tokens, "stream": body.stream}
    if body.stream_options is not None and body.stream_options.include_obfuscation is not None:
        chat["stream_options"] = {"include_obfuscation": body.stream_options.include_obfuscation}
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    elif body.top_logprobs is not None:
        chat["top_logprobs"] = body.top_logprobs
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.verbosity is not None:
        chat["verbosity"] = body.text.verbosity
    if body.tools is not None:
        chat["tools"] = tools.shown
    if body.tool_choice is not None:
        chat["tool_choice"] = chosen(body.tool_choice)
    return chat


def _format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _context(before: Sequence[Item], own: Sequence[Item]) -> bytes:
    return written([*before, *own])
