"""Replaces the weights of all verifiers of a service together, or of none."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress
from dataclasses import replace

from services.abandoned import may_be_left
from speculation.errors import OutriderError, Unavailable
from speculation.ports import VerifierLink
from speculation.reloads import ReloadOrder, ReloadStep, RunningAnswers

log = logging.getLogger(__name__)

# How often verifiers that have replaced their weights are told to keep them.
_TRIES = 3


class Reloads:
    """The reloads that one router orders, one at a time.

    Args:
        keeping_s, beat_s: as in ``RouterWaits``.
    """

    def __init__(self, verifier: VerifierLink, keeping_s: float, beat_s: float) -> None:
        self._verifier = verifier
        self._keeping_s, self._beat_s = keeping_s, beat_s
        self._task: asyncio.Task[None] | None = None

    async def reload(self, folder: str, running: RunningAnswers, within_s: float) -> None:
        """As ``services.api.messages.RouterPort.reload``. Who stops to wait does not stop it."""
        if self._task is not None and not self._task.done():
            raise Unavailable("the weights are being replaced already; try again")
        order = ReloadOrder(reload_id=uuid.uuid4().hex, step="read", folder=folder, running=running, within_s=within_s)
        self._task = may_be_left(asyncio.create_task(self._replace(order), name="reload"))
        await asyncio.shield(self._task)

    async def _replace(self, order: ReloadOrder) -> None:
        beating = asyncio.create_task(self._beat(replace(order, step="alive")), name="reload-lives")
        try:
            await self._step_by_step(order)
        finally:
            beating.cancel()

    async def _beat(self, order: ReloadOrder) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            with suppress(OutriderError):
                await self._verifier.reload(order)

    async def _step_by_step(self, order: ReloadOrder) -> None:
        steps: tuple[ReloadStep, ...] = ("read", "pause", "replace")
        try:
            for step in steps:
                await self._verifier.reload(replace(order, step=step))
        except BaseException as error:
            log.warning("the weights in %s are not served: %s", order.folder, error)
            try:
                await self._verifier.reload(replace(order, step="undo"))
            except OutriderError as lost:
                # A verifier that has not heard of it gives the reload up by itself.
                log.error("not all verifiers have confirmed that they serve what they served before: %s", lost)
            raise
        await self._keep(replace(order, step="keep"))

    async def _keep(self, order: ReloadOrder) -> None:
        for left in reversed(range(_TRIES)):
            try:
                await self._verifier.reload(order)
                return
            except OutriderError as error:
                log.warning("not all verifiers have confirmed the new weights: %s", error)
                if not left:
                    raise Unavailable(
                        f"the new weights serve, but not at all verifiers: {error}; reload them once more"
                    ) from error
            await asyncio.sleep(self._keeping_s)
