"""Messages of the role system behind others, for chat templates that take them at the beginning alone.

Claude Code sends such messages with its first request. They stay where they are, as marked text of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.api.messages import ChatMessage


def as_users_text(messages: Sequence[ChatMessage], paths: Sequence[str]) -> tuple[tuple[ChatMessage, ...], tuple[str, ...]]:
    """The conversation with one system message at most, its first one; and where the content of each message stands.

    Args:
        paths: that of ``messages``.
    """
    kept: list[ChatMessage] = []
    where: list[str] = []
    for index, (message, path) in enumerate(zip(messages, paths, strict=True)):
        told = message
        if index and message.role == "system":
            told = ChatMessage(role="user", content=f"<system>\n{message.content}\n</system>")
        if kept and told.role == kept[-1].role == "user":
            kept[-1] = replace(kept[-1], content=f"{kept[-1].content}\n{told.content}")
            continue
        kept.append(told)
        where.append(path)
    return tuple(kept), tuple(where)
