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
    kept: list[ChatMessage] = []
    where: list[_Place] = []
    for index, (message, place) in enumerate(zip(messages, places, strict=True)):
        told = message
        if index and message.role == "system":
            if len(kept) == 1 and kept[0].role == "system":
                kept[0] = replace(kept[0], content=f"{kept[0].content}\n\n{message.content}")
                continue
            told = ChatMessage(role="user", content=f"<system>\n{message.content}\n</system>")
        beside = message.role == "system" or (index > 0 and messages[index - 1].role == "system")
        if kept and beside and told.role == kept[-1].role == "user":
            kept[-1] = replace(kept[-1], content=f"{kept[-1].content}\n{told.content}")
            continue
        kept.append(told)
        where.append(place)
    return tuple(kept), tuple(where)
