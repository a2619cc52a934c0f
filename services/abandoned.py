"""Work that goes on although whoever waited for it may have gone."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

_Work = TypeVar("_Work", bound="asyncio.Future[Any]")


def may_be_left(work: _Work) -> _Work:
    """The work itself. Who waits hears of its error; where nobody does any more, asyncio does not log it with its trace."""
    work.add_done_callback(_look)
    return work


def _look(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()
