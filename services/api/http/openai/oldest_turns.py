"""Leaves out the oldest turns of a conversation that is longer than the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from services.api.messages import ChatMessage
from speculation.errors import InvalidArgument, PromptTooLong

Messages = tuple[ChatMessage, ...]
Tokenize = Callable[[Messages], Awaitable[tuple[int, ...]]]


async def fitting(messages: Messages, tokenize: Tokenize, most: int) -> tuple[int, ...]:
    """The tokens of a conversation from its oldest turn on from which it has at most ``most``.

    The instructions at its beginning stay. What is kept behind them begins with a user's message, so that no call of a tool
    loses its result. Tokenises as often as a binary search over the user's messages looks.

    Raises:
        PromptTooLong: the user's last message alone is too long.
        InvalidArgument: as ``tokenize``.
    """
    begin = next((index for index, each in enumerate(messages) if each.role != "system"), len(messages))
    users = [index for index, each in enumerate(messages) if index > begin and each.role == "user"]
    starts = [begin, *users]
    # The first start is the whole conversation, and mostly fits.
    low, high, kept = 0, len(starts) - 1, None
    probe = low
    while low <= high:
        shown = (*messages[:begin], *messages[starts[probe] :])
        last = low == high
        found = await _within(shown, tokenize, most, must=last and kept is None, whole=probe == 0)
        if found is None:
            low = probe + 1
        else:
            kept, high = found, probe - 1
        probe = (low + high) // 2
    assert kept is not None, "the last probe fits or raises"
    return kept


async def _within(
    shown: Sequence[ChatMessage], tokenize: Tokenize, most: int, *, must: bool, whole: bool
) -> tuple[int, ...] | None:
    """The tokens; None: they are too many, unless they ``must`` fit."""
    try:
        ids = await tokenize(tuple(shown))
    except PromptTooLong:
        if must:
            raise
        return None
    except InvalidArgument as error:
        if whole:
            raise
        # A message has another number here than in the request.
        raise type(error)("messages", error.value, error.allowed) from error
    return ids if must or len(ids) <= most else None
