"""Answers of one arithmetic: no answer begins at a verifier with some weights and goes on at one with others."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from speculation.errors import NotBegun
from speculation.messages import Finished, GenerationRequest, Progress


async def of_one_arithmetic(
    arithmetic: str, request: GenerationRequest, events: AsyncGenerator[Progress | Finished, None]
) -> AsyncGenerator[Progress | Finished, None]:
    """The events of an answer; the first tokens say by which arithmetic they were chosen.

    Args:
        arithmetic: this verifier's own, see ``arithmetic_of``.

    Raises:
        NotBegun: the answer was begun by another one.
    """
    async with aclosing(events):
        if request.committed and request.arithmetic not in ("", arithmetic):
            raise NotBegun(
                f"the answer was begun by a verifier with other weights, dtype or kernels ({request.arithmetic}), "
                f"and this one ({arithmetic}) would not go on with the same tokens"
            )
        told = False
        async for event in events:
            if not told and isinstance(event, Progress):
                event, told = replace(event, arithmetic=arithmetic), True
            yield event
