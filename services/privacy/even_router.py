"""Sends private answers at an even pace: the same number of tokens in every event, and the same time between events.

Even on an encrypted connection, the number of tokens at once and the time between them show how much was drafted right,
and so what an answer is about (arXiv 2411.01076). A private answer's events show neither, nor does its report. Nothing is
drafted for it from other requests' texts (``make_plan``), since its speed would show that they had the same text.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from typing_extensions import override

from services.api.messages import ClientRequest, Completion, RouterPort, TextChunk, Timing
from services.api.passing_router import PassingRouter
from services.privacy.config import Privacy
from speculation.errors import InvalidArgument
from speculation.types import SpeculationStats, TokenLogprobs


class EvenRouter(PassingRouter):
    """Implements ``RouterPort`` by another router, whose private answers it evens out. Times are the event loop's."""

    def __init__(self, router: RouterPort, privacy: Privacy) -> None:
        super().__init__(router)
        self._privacy = privacy

    @override
    def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        if self._privacy.strict and request.private is False:
            raise InvalidArgument("privacy", "none", "strict, or unset: all answers of this server are private")
        if not self._privacy.strict and not request.private:
            return self._router.generate(request)
        self._check_report(request)
        # No other request has this salt: nothing is shared, and nothing is learnt.
        return self._evenly(replace(request, private=True, whole=False, cache_salt=secrets.token_hex(16)))

    def _check_report(self, request: ClientRequest) -> None:
        """Refuse what would tell of drafts."""
        why = "all answers of this server are private" if self._privacy.strict else "the answer is private"
        if request.report != "none":
            raise InvalidArgument("speculation.report", request.report, f"none, or unset: {why}")
        if request.compare:
            raise InvalidArgument("speculation.compare", ", ".join(request.compare), f"unset: {why}")
        if request.group:
            raise InvalidArgument("speculation.group", request.group, f"unset: {why}")

    async def _evenly(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        clock, began, ticks = asyncio.get_running_loop().time, asyncio.get_running_loop().time(), 0
        pieces = _Pieces(self._privacy.tokens)
        reading = asyncio.create_task(self._read(request, pieces), name="private-answer")
        try:
            while True:
                ticks += 1
                await asyncio.sleep(began + ticks * self._privacy.interval_s - clock())
                if (chunk := pieces.take(ended=reading.done())) is not None:
                    yield chunk
                if reading.done() and not pieces.left:
                    yield self._told(await reading, clock() - began)
                    return
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, request: ClientRequest, pieces: _Pieces) -> Completion | None:
        async with aclosing(self._router.generate(request)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    return event
                pieces.add(event)
        return None

    def _told(self, completion: Completion | None, seconds: float) -> Completion:
        """The end, without what only the pace of decoding could tell."""
        assert completion is not None, "a router's answer ends in a completion or an error"
        timing = Timing(queue_s=0.0, time_to_first_token_s=self._privacy.interval_s, total_s=seconds)
        return replace(completion, rule="", learnt="", cached_tokens=0, stats=SpeculationStats(), timing=timing)


class _Pieces:
    """Tokens that have come, with their text, and are sent later in pieces of ``size``."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Each token with its log-probability, and where its text ends in the answer.
        self._tokens: deque[tuple[int, TokenLogprobs | None, int]] = deque()
        self._text = ""
        self._shown = 0
        self._of_prompt: tuple[TokenLogprobs, ...] = ()
        self._arithmetic = ""

    @property
    def left(self) -> bool:
        """Whether something has not been sent."""
        return bool(self._tokens or self._text)

    def add(self, chunk: TextChunk) -> None:
        """Take what has come."""
        self._text += chunk.text
        self._of_prompt += chunk.prompt_logprobs
        self._arithmetic = chunk.arithmetic or self._arithmetic
        ends = chunk.text_ends or (self._shown + len(self._text),) * len(chunk.token_ids)
        logprobs = chunk.logprobs or (None,) * len(chunk.token_ids)
        self._tokens += zip(chunk.token_ids, logprobs, ends, strict=True)

    def take(self, *, ended: bool) -> TextChunk | None:
        """The next piece; None: it has not come yet, or there is no more."""
        if len(self._tokens) < self._size and not (ended and self.left):
            return None
        taken = [self._tokens.popleft() for _ in range(min(self._size, len(self._tokens)))]
        # Text may come after its token, and what is left at the end belongs to the last one.
        last = ended and not self._tokens
        count = len(self._text) if last else max(0, taken[-1][2] - self._shown)
        text, self._text = self._text[:count], self._text[count:]
        self._shown += len(text)
        of_prompt, self._of_prompt = self._of_prompt, ()
        return TextChunk(
            text=text,
            token_ids=tuple(token for token, _, _ in taken),
            logprobs=tuple(entry for _, entry, _ in taken if entry is not None),
            text_ends=tuple(end for _, _, end in taken),
            prompt_logprobs=of_prompt,
            arithmetic=self._arithmetic,
        )
