"""The HTTP server in front of a router: our own socket, uvicorn on it, in the event loop of the router."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from services.access.gate import Gate, open_gate
from services.api.config import HEADER_BYTES, HttpConfig, TlsFiles, public_files
from services.api.http.accepting import AcceptingServer
from services.api.http.app import HttpApp
from services.api.http.arriving_requests import arriving_within
from services.api.http.cross_origin import for_pages_of
from services.api.http.responses.stored_responses import ResponsesInMemory, ResponseStore
from services.api.messages import RouterPort
from services.api.sockets import check_http, listen
from services.links.tls import renewed_files
from speculation.errors import Unavailable

log = logging.getLogger(__name__)

# Seconds for which a connection may lie idle between two requests.
_KEEP_ALIVE_S = 30
# Seconds for answers that have been ended to reach their clients.
_LAST_WORDS_S = 2


class HttpServer:
    """A running HTTP server.

    Attributes:
        address: the "host:port" that it listens on.
        url: where requests go.
    """

    def __init__(self, app: HttpApp, config: HttpConfig, listening: socket.socket) -> None:
        self._app = app
        self._public = config.public
        self._server = AcceptingServer(_uvicorn_config(app, config), listening, config.public.max_connections)
        self._serving = asyncio.create_task(self._server.serve(), name="http")
        self._renewing = asyncio.create_task(self._renew(), name="http-certificates")
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.address = f"{host}:{listening.getsockname()[1]}"
        self.url = f"{'https' if config.public.tls else 'http'}://{self.address}"

    async def started(self) -> None:
        """Wait until requests are answered.

        Raises:
            Unavailable: the server has ended at once.
        """
        while not self._server.started:
            if self._serving.done():
                raise Unavailable("the HTTP server has not started") from self._serving.exception()
            await asyncio.sleep(0.001)

    async def stop(self, grace_s: float | None = None) -> None:
        """Report not to be ready, wait for balancers to see it, refuse new requests, and give running ones time to end.

        Args:
            grace_s: seconds for running requests; then balancers are not waited for. None: both as configured.
        """
        self._app.leaving = True
        if grace_s is None:
            await asyncio.sleep(self._public.drain_delay_s)
        if self._public.shared:
            # From here on the system gives new connections to the other routers.
            for listening in self._server.servers:
                listening.close()
        await self._app.drain(self._public.drain_grace_s if grace_s is None else grace_s)
        self._server.should_exit = True
        self._renewing.cancel()
        await self._serving

    async def _renew(self) -> None:
        """Show renewed certificates at new connections; those that exist live on."""
        tls = self._public.tls
        if tls is None:
            return
        kept = public_files(tls)
        shown = True
        while True:
            if shown:
                await kept.renewed()
            else:
                await asyncio.sleep(renewed_files.LOOK_S)
            shown = self._shown(tls)

    def _shown(self, tls: TlsFiles) -> bool:
        """Show the files' certificate from now on; False: they have changed again since they were found to fit."""
        try:
            if (context := self._server.config.ssl) is not None:
                context.load_cert_chain(tls.certificate, tls.key)
        except (OSError, ValueError) as error:
            log.warning("the renewed %s is not shown yet: %s", tls.certificate, error)
            return False
        return True


async def serve_http(
    router: RouterPort,
    config: HttpConfig,
    gate: Gate | None = None,
    exposition: Callable[[], bytes] = bytes,
    store: ResponseStore | None = None,
) -> HttpServer:
    """Start the HTTP server.

    Args:
        exposition: what ``/metrics`` says, where there is one; called in a thread.
        gate: shared with other public servers of the process; None: one of its own, from ``config``.
        store: where responses are kept; None: in memory.

    Raises:
        ConfigurationError: see ``check_http``.
    """
    check_http(config)
    public = config.public
    gate = gate or open_gate(public.api_key_hashes, public.keys_file, public.audit_log)
    app = HttpApp(router, config, gate, store or ResponsesInMemory(config.responses), exposition)
    server = HttpServer(app, config, listen(config))
    await server.started()
    return server


def _uvicorn_config(app: HttpApp, config: HttpConfig) -> uvicorn.Config:
    public = config.public
    tls = public.tls
    return uvicorn.Config(
        for_pages_of(config.cors_origins, app),
        # h11 bounds headers, and refuses what httptools lets through.
        http=arriving_within(config.arrives_s, public.max_connection_age_s),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        h11_max_incomplete_event_size=HEADER_BYTES,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )
