"""What becomes of the requests when a pass fails or hangs, or the target is lost; and whether the loop is fit to go on."""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.verifier.engine.admission import Admission
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.pass_queue import PassQueue
from services.verifier.target_port import Target
from speculation.errors import Internal, OutriderError, TargetLost, Unavailable

log = logging.getLogger(__name__)

# So many failed passes in a row, and the target is given up for broken.
_MAX_FAILURES = 3


class Faults:
    """Whoever asked for an answer that is ended here with ``Unavailable`` may ask another verifier, or this one again:
    nothing committed is lost.

    Args:
        forget: tells everybody but the target that a request has ended.

    Attributes:
        recovering: the target is being built anew.
    """

    def __init__(
        self, target: Target, requests: Admission, passes: PassQueue, forget: Callable[[LiveRequest], None]
    ) -> None:
        self.recovering = False
        self._target = target
        self._requests = requests
        self._passes = passes
        self._forget = forget
        self._failures = 0
        # Requests that have been ended while a pass with their rows hangs: the target holds them until it comes back.
        self._held: list[str] = []

    @property
    def broken(self) -> bool:
        """Whether nothing but another process helps."""
        return self._failures >= _MAX_FAILURES or self._passes.lost

    def succeeded(self) -> None:
        """A pass has."""
        self._failures = 0

    async def failed(self, error: Exception) -> None:
        """A pass has failed, and with it all requests that are being decoded."""
        log.error("a decoding step failed", exc_info=error)
        self._failures += 1
        await self._abandon()
        unknown = Internal("the decoding step failed; the server's log says why")
        for live in list(self._requests.live.values()):
            live.fail(error if isinstance(error, OutriderError) else unknown)
            self._target.close(live.id)
            self._forget(live)

    async def recover(self, lost: TargetLost) -> None:
        """Build the target anew."""
        log.error("the target is lost and built anew: %s", lost)
        self.recovering = True
        self._passes.drop()
        self._held.clear()
        self.lose(Unavailable("the target is being restarted; try again"))
        while self._failures < _MAX_FAILURES:
            self._failures += 1
            try:
                await self._passes.recover()
                self.recovering = False
                return
            except TargetLost as error:
                log.error("and lost again: %s", error)
            except Exception:
                log.exception("the target cannot be built anew")
                self._failures = _MAX_FAILURES
        self.recovering = False
        self.lose(Unavailable("the target is lost"), waiting=True)

    def hung(self) -> None:
        """A pass hangs. Nobody here will be answered soon."""
        self._held += self._requests.live
        self.lose(Unavailable("a pass of the target hangs; try another verifier"), waiting=True)

    async def returned(self) -> None:
        """It has come back: begin anew."""
        await self._abandon()
        while self._held:
            self._target.close(self._held.pop())

    def lose(self, error: OutriderError, *, waiting: bool = False) -> None:
        """End the requests that are being decoded, and those that wait, without freeing anything: what the target held is
        lost, or a pass with its rows may be under way still."""
        for live in list(self._requests.live.values()):
            live.fail(error)
            self._forget(live)
        while waiting and self._requests.waiting:
            live = self._requests.waiting.popleft()
            live.fail(error)
            self._forget(live)

    async def _abandon(self) -> None:
        try:
            await self._passes.abandon()
        except TargetLost as lost:
            await self.recover(lost)
