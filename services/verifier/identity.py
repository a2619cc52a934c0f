"""Answers of one arithmetic: no answer begins at a verifier with some weights and goes on at one with others. And of one
tokenizer: no verifier takes token ids that another one's mean."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from speculation.errors import NotBegun
from speculation.messages import Finished, GenerationRequest, Progress


def check_tokenizer(own: str, request: GenerationRequest) -> None:
    """Check that a router means the same by token ids as this verifier's model.

    Args:
        own: digest of this model's tokenizer; empty: not known.

    Raises:
        NotBegun: it does not.
    """
    if own and request.tokenizer not in ("", own):
        raise NotBegun(
            f"the router's model has another tokenizer ({request.tokenizer[:16]}) than this verifier's ({own[:16]}): "
            "their settings must name one model"
        )


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
