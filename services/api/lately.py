"""Answers that hold for a second, however many ask: anyone may, and each of them asks a verifier."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_FRESH_S = 1.0


class Lately(Generic[_Answer]):
    """The last answer; asked for again when it is old.

    Args:
        otherwise: the answer where asking fails.
    """

    def __init__(self, ask: Callable[[], Awaitable[_Answer]], otherwise: _Answer) -> None:
        self._ask = ask
        self._answer = self._otherwise = otherwise
        self._asked_at = -float("inf")
        self._lock = asyncio.Lock()

    async def __call__(self) -> _Answer:
        async with self._lock:
            if time.monotonic() - self._asked_at > _FRESH_S:
                try:
                    self._answer = await self._ask()
                except Exception:
                    log.exception("an answer about the service's state could not be had")
                    self._answer = self._otherwise
                self._asked_at = time.monotonic()
            return self._answer
