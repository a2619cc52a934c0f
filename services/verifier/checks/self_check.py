"""Decodes one in so many answers a second time, without drafts, and compares: losslessness, checked in service.

A check costs what its answer costs, so it runs while nothing else does, and is given up as soon as a request comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from services.logs.names import log_name
from services.metrics.registry import DROPPED, Metrics
from speculation.errors import OutriderError
from speculation.messages import Finished, GenerationRequest, Progress
from speculation.types import Plan

log = logging.getLogger(__name__)

_PLAIN = Plan(strategy="autoregressive")
# Seconds between looks for a pause, and seconds for which an answer is kept for one.
_LOOK_S, _KEPT_S = 0.5, 60.0


class Decoder(Protocol):
    """What decodes: a ``DecodingLoop``."""

    @property
    def running(self) -> int:
        """Requests being decoded."""

    @property
    def waiting(self) -> int:
        """Requests in the waiting queue."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """Decode one request."""


class SelfCheck:
    """Watches the answers of one loop, and checks some of them, one at a time.

    An answer under the rejection rule is not checked: its tokens may depend on drafts.

    Args:
        every: one in so many answers with drafts is checked; 0: none.
        metrics: where checks and failures are counted.
    """

    def __init__(self, decoder: Decoder, every: int, metrics: Metrics = DROPPED) -> None:
        self._decoder = decoder
        self._every = every
        self._seen = 0
        self._checks = metrics.counter("lossless_checks_total")
        self._failures = metrics.counter("lossless_check_failures_total")
        self._tenant: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def watched(
        self, request: GenerationRequest, events: AsyncGenerator[Progress | Finished, None]
    ) -> AsyncGenerator[Progress | Finished, None]:
        """The events of an answer, as they come."""
        tokens, arithmetic = list(request.committed), request.arithmetic
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Progress):
                    if event.restarted:
                        tokens.clear()
                    tokens += event.token_ids
                    arithmetic = event.arithmetic or arithmetic
                else:
                    self._ended(request, tokens, arithmetic)
                yield event

    async def forget(self, tenant: str) -> None:
        """Give up a check of a tenant's answer."""
        if self._task is not None and self._tenant == tenant:
            await self.stop()

    async def stop(self) -> None:
        """Give up the check under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, request: GenerationRequest, tokens: Sequence[int], arithmetic: str) -> None:
        if not self._every or not request.plan.speculates or request.plan.acceptance != "walk":
            return
        self._seen += 1
        if self._seen % self._every == 0 and (self._task is None or self._task.done()):
            self._tenant = request.tenant
            self._task = asyncio.create_task(self._check(request, tokens, arithmetic), name="self-check")

    async def _check(self, request: GenerationRequest, tokens: Sequence[int], arithmetic: str) -> None:
        # Nothing of it is shared with other requests, so it is computed from the first token on.
        again = replace(
            request, request_id=f"{request.request_id}.check", plan=_PLAIN, tenant=None, committed=(), prediction=()
        )
        for _ in range(int(_KEPT_S / _LOOK_S)):
            await asyncio.sleep(_LOOK_S)
            if self._load() == 0:
                break
        else:
            return
        found: list[int] = []
        try:
            async with aclosing(self._decoder.generate(again)) as events:
                async for event in events:
                    if isinstance(event, Progress):
                        found += event.token_ids
                        if event.arithmetic not in ("", arithmetic):
                            # Its weights have been replaced.
                            return
                    if self._load() > 1:
                        return
        except OutriderError as error:
            log.info("a check of an answer was given up: %s", error)
            return
        self._checks.add(1)
        if found != tokens:
            self._failures.add(1)
            same = next((at for at, (one, other) in enumerate(zip(found, tokens, strict=False)) if one != other), None)
            where = min(len(found), len(tokens)) if same is None else same
            name = log_name(request.request_id, request.traceparent)
            log.error("request %s (%s) differs from plain decoding at token %d", name, request.plan.strategy, where)

    def _load(self) -> int:
        return self._decoder.running + self._decoder.waiting
