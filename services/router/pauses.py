"""Pauses decoding at all verifiers of a service together, or at none."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from contextlib import suppress

from services.abandoned import to_the_end
from speculation import limits
from speculation.errors import ConfigurationError, OutriderError
from speculation.messages import VerifierCard
from speculation.ports import VerifierLink
from speculation.reloads import PauseMode, ReloadOrder, ReloadStep

log = logging.getLogger(__name__)

# Pauses that are known to have ended.
_ENDED = 100


class Pauses:
    """Lets the verifiers stand still, and go on.

    Args:
        joining_s: as in ``RouterWaits``.
    """

    def __init__(self, verifier: VerifierLink, joining_s: float) -> None:
        self._verifier = verifier
        self._joining_s = joining_s
        self._joining: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        # The ids of pauses that go on as far as this router knows, and of those that have ended.
        self._known: set[str] = set()
        self._ended: deque[str] = deque(maxlen=_ENDED)

    async def pause(self, mode: PauseMode, within_s: float) -> None:
        """As ``services.api.weights_port.WeightsPort.pause``."""
        waits_s, pause_id = within_s if mode == "wait" else 0.0, uuid.uuid4().hex
        self._known.add(pause_id)
        try:
            await self._order("hold", pause_id, waits_s)
        except (Exception, asyncio.CancelledError):
            # Also where nobody waits for it any more, and not even for this.
            try:
                await to_the_end(asyncio.create_task(self.resume()))
            except OutriderError as lost:
                log.error("not all verifiers have confirmed that they decode: %s", lost)
            raise
        self._stop_joining()
        self._let_join(pause_id, waits_s)

    async def resume(self) -> None:
        self._stop_joining()
        self._have_ended()
        await self._order("go")

    async def paused(self) -> bool:
        try:
            return await self._order("held") == "held"
        except ConfigurationError:
            # They differ: one has begun anew since, and decodes.
            return False

    def seen(self, card: VerifierCard) -> None:
        """Take part in a pause that another router was told of, which may be gone before it ends."""
        if card.paused is None:
            return
        if card.pause_id in self._ended:
            # Another router has not heard of its end, and has had a verifier join it that has started since.
            if self._ending is None or self._ending.done():
                self._ending = asyncio.create_task(self._end_again(), name="end-pause-again")
            return
        if card.pause_id:
            # Verifiers of older versions do not tell it.
            self._known.add(card.pause_id)
        if self._joining is None or self._joining.done():
            self._let_join(card.pause_id, limits.RELOAD_S if card.paused == "wait" else 0.0)

    async def _end_again(self) -> None:
        try:
            await self._order("go")
        except OutriderError as error:
            log.info("not all verifiers have confirmed that they decode: %s", error)

    def _let_join(self, pause_id: str, within_s: float) -> None:
        self._joining = asyncio.create_task(self._join(pause_id, within_s), name="pause-late-verifiers")

    async def _join(self, pause_id: str, within_s: float) -> None:
        """Have verifiers that start from now on stand still, until another router resumes."""
        while True:
            try:
                await self._order("join", pause_id, within_s)
            except ConfigurationError:
                # Another router has resumed. One that has started since may have joined.
                self._have_ended()
                with suppress(OutriderError):
                    await self._order("undo", pause_id)
                    return
            except OutriderError as error:
                log.info("not all verifiers have confirmed that they are paused: %s", error)
            await asyncio.sleep(self._joining_s)

    def _stop_joining(self) -> None:
        if self._joining is not None:
            self._joining.cancel()

    def _have_ended(self) -> None:
        self._ended.extend(self._known)
        self._known.clear()

    async def _order(self, step: ReloadStep, pause_id: str = "", within_s: float = 0.0) -> str:
        return await self._verifier.reload(ReloadOrder(reload_id=pause_id, step=step, within_s=within_s))
