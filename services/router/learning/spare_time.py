"""Decides when answers are replayed: one at a time, never while requests wait, and for a bounded share of decoding time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from speculation.errors import OutriderError
from speculation.ports import VerifierPort

log = logging.getLogger(__name__)

# Of the time of answers, what an account earns; and how many seconds it holds at most, so that long peace pays for no storm.
_SHARE, _MOST_S = 0.01, 2.0

Work = Callable[[], Awaitable[None]]


class SpareTime:
    """Runs work that nobody waits for, paid from an account.

    Args:
        verifier: that the work asks; while requests wait there, nothing is begun.
        clock: seconds, never going back.

    Attributes:
        spent_s: that work has taken, in all.
    """

    def __init__(self, verifier: VerifierPort, clock: Callable[[], float] = time.perf_counter) -> None:
        self._verifier = verifier
        self._clock = clock
        self._account_s = 0.0
        self._under_way: asyncio.Task[None] | None = None
        self.spent_s = 0.0

    @property
    def free(self) -> bool:
        """Whether work would be begun: there is none under way, and the account can pay."""
        return self._account_s > 0 and (self._under_way is None or self._under_way.done())

    def earn(self, answer_s: float) -> None:
        """Credit the time of an answer."""
        self._account_s = min(_MOST_S, self._account_s + _SHARE * answer_s)

    def begin(self, work: Work) -> None:
        """Begin, where that is ``free``; what the work raises is logged."""
        if self.free:
            self._under_way = asyncio.get_running_loop().create_task(self._paid(work))

    async def stop(self) -> None:
        """End what is under way."""
        if (task := self._under_way) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settle(self) -> None:
        """Wait until what is under way is done."""
        if (task := self._under_way) is not None:
            await asyncio.wait([task])

    async def _paid(self, work: Work) -> None:
        began = self._clock()
        try:
            if not (await self._verifier.describe()).waiting:
                await work()
        except OutriderError as error:
            log.info("an answer is not replayed: %s", error)
        except Exception:
            # Nobody waits for it: it costs an answer's lesson, no answer.
            log.exception("an answer could not be replayed")
        finally:
            took_s = self._clock() - began
            self.spent_s += took_s
            self._account_s -= took_s
