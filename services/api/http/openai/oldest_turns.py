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

    Where the user's last message alone is too long, its tokens are told as they are.

    Raises:
        PromptTooLong: as ``tokenize``, of that message.
        InvalidArgument: as ``tokenize``.
    """
    begin = next((index for index, each in enumerate(messages) if each.role != "system"), len(messages))
    starts = [begin, *(index for index, each in enumerate(messages) if index > begin and each.role == "user")]

    async def tried(start: int, *, must: bool = False) -> tuple[int, ...] | None:
        shown = (*messages[:begin], *messages[starts[start] :])
        return await _within(shown, tokenize, most, must=must, whole=start == 0)

    last = len(starts) - 1
    if (whole := await tried(0, must=last == 0)) is not None:
        return whole
    kept = await tried(last, must=True)
    assert kept is not None, "what must fit is told however long it is"
    # Of the starts between, the first that fits; none, where the last one does not.
    low, high = 1, last - 1 if len(kept) <= most else 0
    while low <= high:
        probe = (low + high) // 2
        if (found := await tried(probe)) is None:
            low = probe + 1
        else:
            kept, high = found, probe - 1
    return kept


async def _within(
    shown: Sequence[ChatMessage], tokenize: Tokenize, most: int, *, must: bool, whole: bool
) -> tuple[int, ...] | None:
    """The tokens; None: they are too many, and ``must`` not be told all the same."""
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
