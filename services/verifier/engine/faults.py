"""Handles passes that fail or hang and targets that are lost: ends the affected requests and recovers the target."""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.verifier.engine.admission import Admission
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.pass_queue import PassQueue
from services.verifier.model.target_port import Target
from speculation.errors import Internal, OutriderError, TargetLost, Unavailable

log = logging.getLogger(__name__)

# Failures in a row after which the target counts as broken.
_MAX_FAILURES = 3


class Faults:
    """Ends requests when the target fails, and recovers the target.

    A request ended here with ``Unavailable`` can continue at this verifier or another one, from the tokens committed so far.

    Args:
        forget: removes an ended request everywhere but at the target.
        lost: called once a lost target is there again, or cannot be.

    Attributes:
        recovering: whether the target is being rebuilt.
    """

    def __init__(
        self,
        target: Target,
        requests: Admission,
        passes: PassQueue,
        forget: Callable[[LiveRequest], None],
        lost: Callable[[], None],
    ) -> None:
        self.recovering = False
        self._target = target
        self._requests = requests
        self._passes = passes
        self._forget = forget
        self._lost = lost
        self._failures = 0
        # Ids of requests that ended while a pass hung. The target keeps their rows until the pass returns.
        self._held: list[str] = []

    @property
    def broken(self) -> bool:
        """Whether only a new process can help."""
        return self._failures >= _MAX_FAILURES or self._passes.lost

    def succeeded(self) -> None:
        """Note that a pass succeeded."""
        self._failures = 0

    async def failed(self, error: Exception) -> None:
        """End all running requests after a failed pass."""
        log.error("a decoding step failed", exc_info=error)
        self._failures += 1
        await self._abandon()
        unknown = Internal("the decoding step failed; the server's log says why")
        for request in list(self._requests.running.values()):
            request.fail(error if isinstance(error, OutriderError) else unknown)
            self._target.close(request.id)
            self._forget(request)

    async def recover(self, lost: TargetLost) -> None:
        """End the running requests and rebuild the target; if that keeps failing, end the waiting ones as well."""
        log.error("the target is lost and will be rebuilt: %s", lost)
        self.recovering = True
        self._passes.drop()
        self._held.clear()
        self.lose(Unavailable("the target is being restarted; try again"))
        while self._failures < _MAX_FAILURES:
            self._failures += 1
            try:
                await self._passes.recover()
                self.recovering = False
                self._lost()
                return
            except TargetLost as error:
                log.error("the rebuilt target is lost again: %s", error)
            except Exception:
                log.exception("the target cannot be rebuilt")
                self._failures = _MAX_FAILURES
        self.recovering = False
        self._lost()
        self.lose(Unavailable("the target is lost"), waiting=True)

    def hung(self) -> None:
        """End all requests, running and waiting, because a pass hangs."""
        self._held += self._requests.running
        self.lose(Unavailable("a pass of the target hangs; try another verifier"), waiting=True)

    async def returned(self) -> None:
        """Clean up after a hung pass has returned, so that decoding can go on."""
        await self._abandon()
        while self._held:
            self._target.close(self._held.pop())

    def lose(self, error: OutriderError, *, waiting: bool = False) -> None:
        """End the running requests without freeing their rows: the target has lost them, or a pass may still use them.

        Args:
            waiting: end the waiting requests as well.
        """
        for request in list(self._requests.running.values()):
            request.fail(error)
            self._forget(request)
        for request in list(self._requests.waiting) if waiting else ():
            request.fail(error)
            self._forget(request)

    async def _abandon(self) -> None:
        try:
            await self._passes.abandon()
        except TargetLost as lost:
            await self.recover(lost)
