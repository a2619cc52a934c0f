"""Loads and unloads adapters at all verifiers of a service together, or at none."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace

from services.abandoned import to_the_end
from speculation import limits
from speculation.adapters import AdapterOrder, AdapterStep
from speculation.errors import OutriderError
from speculation.ports import VerifierLink

log = logging.getLogger(__name__)


class AdapterChanges:
    """The changes that one router orders."""

    def __init__(self, verifier: VerifierLink) -> None:
        self._verifier = verifier

    async def load(self, name: str, folder: str) -> None:
        """As ``services.api.weights_port.WeightsPort.load_adapter``."""
        order = AdapterOrder(order_id=uuid.uuid4().hex, step="load", name=name, folder=folder)
        await self._or_back(order, "undo")

    async def unload(self, name: str) -> None:
        """As ``services.api.weights_port.WeightsPort.unload_adapter``."""
        order = AdapterOrder(order_id=uuid.uuid4().hex, step="close", name=name, within_s=limits.UNLOAD_S)
        await self._or_back(order, "open")
        # Whoever has gone meanwhile: all drop it, or none.
        await to_the_end(asyncio.create_task(self._verifier.adapt(replace(order, step="drop"))))

    async def _or_back(self, order: AdapterOrder, back: AdapterStep) -> None:
        """Take a step, or go back where not all verifiers can."""
        try:
            await self._verifier.adapt(order)
        except (Exception, asyncio.CancelledError):
            try:
                # Also of one who has gone, and whose server stops.
                await to_the_end(asyncio.create_task(self._verifier.adapt(replace(order, step=back))))
            except OutriderError as error:
                log.error("not all verifiers have gone back to what they served before: %s", error)
            raise
