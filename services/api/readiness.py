"""Whether a router would answer requests, known in time even if asking it hangs."""

from __future__ import annotations

import asyncio
import logging

from services.api.messages import RouterPort
from speculation import limits

log = logging.getLogger(__name__)


class Readiness:
    """Asks a router whether it is ready.

    A question that is not answered in time counts as no, and is left to itself: what hangs may not even end when it is
    cancelled. No second one is asked beside it.
    """

    def __init__(self, router: RouterPort) -> None:
        self._router = router
        self._asking: asyncio.Task[bool] | None = None

    async def ready(self) -> bool:
        """Whether the router is ready; False if it has not said so within ``limits.DESCRIBE_S``."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._router.ready(), name="readiness")
        await asyncio.wait((self._asking,), timeout=limits.DESCRIBE_S)
        if not self._asking.done():
            return False
        asked, self._asking = self._asking, None
        if asked.cancelled():
            # The server stops.
            return False
        if (error := asked.exception()) is not None:
            log.error("the router's readiness could not be checked", exc_info=error)
            return False
        return asked.result()

    async def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
