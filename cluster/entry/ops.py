"""The ops listener of one router. It opens as soon as its port is free, and closes when the router has stopped."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.settings.config import Settings
from services.api.messages import RouterPort
from services.api.readiness import Readiness
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.api.http.ops_listener import OpsListener

log = logging.getLogger(__name__)

# Seconds between tries to listen on a port that another router still has.
_TRY_AGAIN_S = 1.0


class OpsEntry:
    """Serves ``/metrics``, ``/health`` and ``/ready`` of a router, unless ``server.ops_port`` is null.

    Attributes:
        leaving: the router stops; ``/ready`` says so at once, so that balancers send nothing more.
        listener: None while there is none.
    """

    def __init__(self, settings: Settings, exposition: Callable[[], bytes], router: RouterPort) -> None:
        self._server = settings.server
        self._exposition = exposition
        self._readiness = Readiness(router)
        self._trying: asyncio.Task[None] | None = None
        self.leaving = False
        self.listener: OpsListener | None = None

    async def start(self, *, patient: bool) -> None:
        """Listen.

        Args:
            patient: where the port is taken, by the router that this one replaces or by another one of this machine, go on
                trying beside everything else.

        Raises:
            ConfigurationError: the address cannot be used.
        """
        try:
            await self._listen()
        except ConfigurationError as error:
            if not (patient and _is_taken(error)):
                raise
            log.warning("this router has no ops port yet: %s", error)
            self._trying = asyncio.create_task(self._try(), name="ops-port")

    async def stop(self) -> None:
        """Close the port."""
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.gather(self._trying, return_exceptions=True)
        await self._readiness.stop()
        if self.listener is not None:
            await self.listener.stop()

    async def _listen(self) -> None:
        if (port := self._server.ops) is None:
            return
        # Brings uvicorn, which processes without the listener do without.
        from services.api.http.ops_listener import serve_ops

        self.listener = await serve_ops(
            self._server.ops_host, port, self._exposition, self._readiness.ready, leaving=lambda: self.leaving
        )

    async def _try(self) -> None:
        while self.listener is None:
            await asyncio.sleep(_TRY_AGAIN_S)
            try:
                await self._listen()
            except ConfigurationError as error:
                log.debug("%s", error)


def _is_taken(error: ConfigurationError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
