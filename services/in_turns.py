"""Goes through what is made of many tokens, a part at a time: others have their turns of the event loop meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
# Tokens, or pieces of text, of a part: a millisecond or two, with log-probabilities some more.
AT_ONCE = 128


async def in_turns(items: Sequence[_Item]) -> AsyncIterator[Sequence[_Item]]:
    """The items, part by part. A short list is one part."""
    for begin in range(0, len(items), AT_ONCE):
        if begin:
            await asyncio.sleep(0)
        yield items[begin : begin + AT_ONCE]
