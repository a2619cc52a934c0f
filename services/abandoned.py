"""Work that goes on although whoever waited for it may have gone."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

_Made = TypeVar("_Made")
_Work = TypeVar("_Work", bound="asyncio.Future[Any]")


def may_be_left(work: _Work) -> _Work:
    """The work itself. Who waits hears of its error; where nobody does any more, asyncio does not log it with its trace."""
    work.add_done_callback(_look)
    return work


async def to_the_end(work: asyncio.Future[_Made]) -> _Made:
    """What work gives that must not go on while nobody waits for it, such as in a thread.

    Whoever is cancelled meanwhile is so once the work has ended.
    """
    left: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            left = error
    if left is not None:
        _look(work)
        raise left
    return work.result()


def _look(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()
