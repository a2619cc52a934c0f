"""The port for those who operate the service: ``/metrics`` for Prometheus, ``/health`` and ``/ready`` for supervisors.

It speaks plain HTTP without keys, so it belongs on loopback or on an interface that only they reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.api.http.accepting import AcceptingServer
from services.api.http.arriving_requests import arriving_within
from services.api.lately import Lately
from services.api.sockets import bind_ops

log = logging.getLogger(__name__)

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_MOST_CONNECTIONS = 64
# Seconds that a request may take to arrive, so that connections that say nothing do not keep supervisors out.
_ARRIVES_S = 5.0


class OpsListener:
    """A running listener.

    Attributes:
        address: the "host:port" that it listens on.
    """

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], address: str) -> None:
        self._server = server
        self._task = task
        self.address = address

    async def stop(self) -> None:
        """Close the port."""
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


async def serve_ops(
    host: str,
    port: int,
    exposition: Callable[[], bytes],
    ready: Callable[[], Awaitable[bool]],
    leaving: Callable[[], bool] = lambda: False,
) -> OpsListener:
    """Listen for those who operate the service.

    Args:
        port: 0 takes any free one.
        exposition: what ``/metrics`` says; called in a thread.
        ready: whether requests would be answered now; must answer in time.
        leaving: whether the server is stopping; unlike ``ready``, asked each time.

    Raises:
        ConfigurationError: see ``bind_ops``.
    """
    listening = bind_ops(host, port)
    # From now on connections wait for the server, which starts in a moment.
    listening.listen()
    asked = Lately(ready, False)

    async def metrics(_: Request) -> Response:
        return Response(await asyncio.to_thread(exposition), media_type=TEXT)

    async def health(_: Request) -> Response:
        # That this answers says what a supervisor wants to know: the process lives and its event loop turns.
        return JSONResponse({"status": "alive"})

    async def readiness(_: Request) -> Response:
        if leaving():
            return JSONResponse({"status": "stopping"}, 503)
        answer = await asked()
        return JSONResponse({"status": "ready" if answer else "not ready"}, 200 if answer else 503)

    routes = [Route("/metrics", metrics), Route("/health", health), Route("/ready", readiness)]
    config = uvicorn.Config(
        Starlette(routes=routes),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=arriving_within(_ARRIVES_S),
        ws="none",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    server = AcceptingServer(config, listening, _MOST_CONNECTIONS)
    task = asyncio.create_task(server.serve(), name="ops")
    address = f"{host}:{listening.getsockname()[1]}"
    log.info("metrics and health at http://%s/metrics, /health, /ready", address)
    return OpsListener(server, task, address)
