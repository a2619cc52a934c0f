"""Answers of one arithmetic: no answer begins at a verifier with some weights and goes on at one with others. And of one
tokenizer: no verifier takes token ids that another one's mean."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from speculation.errors import NotBegun
from speculation.messages import Finished, GenerationRequest, Progress


def with_adapter(arithmetic: str, digest: str) -> str:
    """The arithmetic of answers that are computed with an adapter of this digest."""
    return hashlib.sha256(f"{arithmetic} {digest}".encode()).hexdigest()[:16]


async def of_one_arithmetic(
    arithmetic: str | None,
    request: GenerationRequest,
    events: AsyncGenerator[Progress | Finished, None],
    tokenizer: str = "",
) -> AsyncGenerator[Progress | Finished, None]:
    """The events of an answer; the first tokens say by which arithmetic they were chosen.

    Args:
        arithmetic: this verifier's own, see ``arithmetic_of``, with the request's adapter; None: it has no such adapter.
        tokenizer: the digest of this verifier's own; empty: not known.

    Raises:
        NotBegun: the answer was begun by another arithmetic, the router's tokens are of another tokenizer, or the adapter is
            not here.
    """
    async with aclosing(events):
        if tokenizer and request.tokenizer not in ("", tokenizer):
            raise NotBegun(
                f"the router's model has another tokenizer ({request.tokenizer[:16]}) than this verifier's "
                f"({tokenizer[:16]}): their settings must name one model"
            )
        if arithmetic is None:
            raise NotBegun(f"the verifier has no adapter {request.adapter}")
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
