"""Reads the bodies of /v1/messages and /v1/messages/count_tokens by the rules of chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from services.api.http.declared import read_declared
from services.api.http.harmless import honoured
from services.api.http.messages import unhonoured
from services.api.http.messages.chat_body import chat_body_of, turns_of
from services.api.http.messages.own_names import in_own_names
from services.api.http.messages.protocol import CountBody, MessagesBody
from services.api.http.openai.chat_options import with_thinking
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.errors import Refused
from services.api.http.openai.late_system import as_users_text
from services.api.http.openai.request import Asked
from services.api.messages import ChatMessage
from services.api.model_card import ModelCard
from speculation.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedMessage:
    """A request for a message.

    Attributes:
        paths: where the content of each of the chat's messages stands in the body.
        thinking: whether the model is to think first; None: it does not say.
        unread: fields without effect.
    """

    asked: Asked
    paths: tuple[str, ...]
    thinking: bool | None = None
    unread: tuple[str, ...] = ()

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors within have the body's names of fields."""
        with _naming(self.paths):
            yield


def read_message(body: dict[str, Any]) -> AskedMessage:
    """What a body of /v1/messages asks for.

    Raises:
        InvalidArgument: a field is wrong, unknown or not honoured; names it.
    """
    return _read(MessagesBody, body)


def read_count(body: dict[str, Any]) -> AskedMessage:
    """What a body of /v1/messages/count_tokens asks for.

    Raises:
        InvalidArgument: as ``read_message``.
    """
    return _read(CountBody, body)


def _read(kind: type[CountBody], body: dict[str, Any]) -> AskedMessage:
    given = read_declared(kind, _honoured(body), hints=unhonoured.HINTS)
    turns = turns_of(given)
    paths = tuple(turn.path for turn in turns.turns)
    with _naming(paths):
        asked = read_chat(chat_body_of(given, turns))
    if isinstance(given, MessagesBody):
        asked = replace(asked, clips_length=True, answers=given.max_tokens > 0)
    thinking = given.thinking
    if thinking is None:
        return AskedMessage(asked=asked, paths=paths)
    asked = replace(asked, thoughts=thinking.display != "omitted")
    wanted = {"enabled": True, "disabled": False}.get(thinking.type)
    return AskedMessage(asked=asked, paths=paths, thinking=wanted)


def _honoured(body: dict[str, Any]) -> dict[str, Any]:
    """The body without fields that ask for nothing."""
    kept = honoured(body, unhonoured.BODY, codes=unhonoured.CODES)
    tools = kept.get("tools")
    if isinstance(tools, list):
        kept["tools"] = [
            honoured(tool, unhonoured.TOOL, f"tools[{index}]") if isinstance(tool, dict) else tool
            for index, tool in enumerate(tools)
        ]
    return kept


def fitted(message: AskedMessage, card: ModelCard, *, strict: bool) -> AskedMessage:
    """The request as the model's chat template reads it.

    Args:
        strict: what it does not read is refused, not left out.

    Raises:
        Refused: that is so; names the field.
    """
    asked, unread, paths = message.asked, message.unread, message.paths
    if not card.late_system:
        turns = tuple(each for each in asked.inputs[0] if isinstance(each, ChatMessage))
        conversation, paths = as_users_text(turns, paths)
        asked = replace(asked, inputs=(conversation,))
    if message.thinking is not None:
        if (chat := with_thinking(asked.chat, card, message.thinking)) is None:
            unread = ("thinking", *unread)
        else:
            asked = replace(asked, chat=chat)
    if strict and unread:
        raise Refused(unread[0], "set", "unset: this model's chat template does not read it (server.unknown_fields)")
    return replace(message, asked=asked, paths=paths, unread=unread)


@contextmanager
def _naming(paths: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except InvalidArgument as error:
        raise in_own_names(error, paths) from error
