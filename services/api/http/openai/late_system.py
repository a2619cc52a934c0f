"""Messages of the role system behind other ones, for chat templates that take them at the beginning alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from services.api.messages import ChatMessage

_Place = TypeVar("_Place")


def as_users_text(
    messages: Sequence[ChatMessage], places: Sequence[_Place]
) -> tuple[tuple[ChatMessage, ...], tuple[_Place, ...]]:
    """The conversation with one system message at most, its first one; and the place of each message.

    Those that follow the first one directly are part of it. Others stay where they are, as marked text of the user, in one
    turn with what the user says before and after: Claude Code and Codex send such ones.

    Args:
        places: those of ``messages``.
    """
    # The first message of each turn, all of its texts, and where it stands.
    turns: list[tuple[ChatMessage, list[str], _Place]] = []
    for index, (message, place) in enumerate(zip(messages, places, strict=True)):
        told = message
        if index and message.role == "system":
            if len(turns) == 1 and turns[0][0].role == "system":
                turns[0][1].append(message.content)
                continue
            told = ChatMessage(role="user", content=f"<system>\n{message.content}\n</system>")
        beside = message.role == "system" or (index > 0 and messages[index - 1].role == "system")
        if turns and beside and told.role == turns[-1][0].role == "user":
            turns[-1][1].append(told.content)
        else:
            turns.append((told, [told.content], place))
    return tuple(_joined(first, texts) for first, texts, _ in turns), tuple(place for _, _, place in turns)


def _joined(first: ChatMessage, texts: Sequence[str]) -> ChatMessage:
    return replace(first, content=("\n\n" if first.role == "system" else "\n").join(texts))
