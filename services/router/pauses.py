"""Pauses decoding at all verifiers of a service together, or at none."""

from __future__ import annotations

import logging

from speculation.errors import ConfigurationError, OutriderError
from speculation.ports import VerifierLink
from speculation.reloads import PauseMode, ReloadOrder, ReloadStep

log = logging.getLogger(__name__)


class Pauses:
    """Lets the verifiers stand still, and go on."""

    def __init__(self, verifier: VerifierLink) -> None:
        self._verifier = verifier

    async def pause(self, mode: PauseMode, within_s: float) -> None:
        """As ``services.api.weights_port.WeightsPort.pause``."""
        try:
            await self._order("hold", within_s if mode == "wait" else 0.0)
        except BaseException:
            # Also where nobody waits for it any more.
            try:
                await self.resume()
            except OutriderError as lost:
                log.error("not all verifiers have confirmed that they decode: %s", lost)
            raise

    async def resume(self) -> None:
        await self._order("go")

    async def paused(self) -> bool:
        try:
            return await self._order("held") == "held"
        except ConfigurationError:
            # They differ: one has begun anew since, and decodes.
            return False

    async def _order(self, step: ReloadStep, within_s: float = 0.0) -> str:
        return await self._verifier.reload(ReloadOrder(reload_id="pause", step=step, within_s=within_s))
