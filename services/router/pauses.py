"""Pauses decoding at all verifiers of a service together, or at none."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from speculation import limits
from speculation.errors import ConfigurationError, OutriderError
from speculation.messages import VerifierCard
from speculation.ports import VerifierLink
from speculation.reloads import PauseMode, ReloadOrder, ReloadStep

log = logging.getLogger(__name__)

# How often verifiers that have started during a pause are looked for.
_AGAIN_S = 1.0


class Pauses:
    """Lets the verifiers stand still, and go on."""

    def __init__(self, verifier: VerifierLink) -> None:
        self._verifier = verifier
        self._joining: asyncio.Task[None] | None = None

    async def pause(self, mode: PauseMode, within_s: float) -> None:
        """As ``services.api.weights_port.WeightsPort.pause``."""
        waits_s = within_s if mode == "wait" else 0.0
        try:
            await self._order("hold", waits_s)
        except BaseException:
            # Also where nobody waits for it any more.
            try:
                await self.resume()
            except OutriderError as lost:
                log.error("not all verifiers have confirmed that they decode: %s", lost)
            raise
        self._stop_joining()
        self._let_join(waits_s)

    async def resume(self) -> None:
        self._stop_joining()
        await self._order("go")

    async def paused(self) -> bool:
        try:
            return await self._order("held") == "held"
        except ConfigurationError:
            # They differ: one has begun anew since, and decodes.
            return False

    def seen(self, card: VerifierCard) -> None:
        """Take part in a pause that another router was told of, which may be gone before it ends."""
        if card.paused is not None and (self._joining is None or self._joining.done()):
            self._let_join(limits.RELOAD_S if card.paused == "wait" else 0.0)

    def _let_join(self, within_s: float) -> None:
        self._joining = asyncio.create_task(self._join(within_s), name="pause-late-verifiers")

    async def _join(self, within_s: float) -> None:
        """Have verifiers that start from now on stand still, until another router resumes."""
        while True:
            try:
                await self._order("join", within_s)
            except ConfigurationError:
                # Another router has resumed. One that has started since may have joined.
                with suppress(OutriderError):
                    await self._order("undo")
                    return
            except OutriderError as error:
                log.info("not all verifiers have confirmed that they are paused: %s", error)
            await asyncio.sleep(_AGAIN_S)

    def _stop_joining(self) -> None:
        if self._joining is not None:
            self._joining.cancel()

    async def _order(self, step: ReloadStep, within_s: float = 0.0) -> str:
        return await self._verifier.reload(ReloadOrder(reload_id="pause", step=step, within_s=within_s))
