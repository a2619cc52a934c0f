"""The public servers in front of a router: gRPC and, where it is wanted, HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import NamedTuple

from cluster import build
from cluster.config import Settings
from cluster.observing import Observing, operated
from services.client_api import RouterPort
from services.links.config import PublicServerConfig
from services.links.public_server import PublicServer, serve_public
from services.openai_api.http_server import HttpServer, serve_http
from services.privacy.even_router import EvenRouter
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)


class Addresses(NamedTuple):
    """Where a service answers: the "host:port" of gRPC, and the URL of OpenAI's API, or None."""

    grpc: str
    http: str | None


class PublicEntry:
    """The servers of one router, running."""

    def __init__(self, grpc: PublicServer, http: HttpServer | None, ops: AsyncExitStack) -> None:
        self._grpc = grpc
        self._http = http
        self._ops = ops
        self.addresses = Addresses(grpc.address, http.url if http is not None else None)

    async def stop(self) -> None:
        """Say NOT_SERVING, refuse calls a little later, and wait until running ones have finished."""
        await asyncio.gather(self._grpc.stop(), *([] if self._http is None else [self._http.stop()]))
        await self._ops.aclose()


async def open_entry(router: RouterPort, settings: Settings, observing: Observing, *, alone: bool = False) -> PublicEntry:
    """Start the servers.

    Args:
        alone: there is one router, whatever the settings say of replicas.

    Raises:
        ConfigurationError: an address is taken, or the settings do not allow a server; nothing is left running.
    """
    public, http = build.server_config(settings), build.http_config(settings)
    if alone:
        public = replace(public, shared=False)
    router = EvenRouter(router, public.privacy)
    # One gate, so that a key's limits count for both servers together.
    gate = observing.gate(public)
    async with AsyncExitStack() as started:
        grpc = await serve_public(router, public, gate)
        started.push_async_callback(grpc.stop, 0)
        serving_http = None if http is None else await serve_http(router, replace(http, public=public), gate)
        if serving_http is not None:
            started.push_async_callback(serving_http.stop, 0)
        ops = await _operated(router, settings, observing, public)
        started.pop_all()
    return PublicEntry(grpc, serving_http, ops)


async def _operated(
    router: RouterPort, settings: Settings, observing: Observing, public: PublicServerConfig
) -> AsyncExitStack:
    stack = AsyncExitStack()
    try:
        await stack.enter_async_context(operated(settings, observing.exposition, router))
    except ConfigurationError as error:
        if not public.shared:
            raise
        # Before the start the port was free, so another router of this service on this node has it.
        log.warning("this router has no ops port: %s", error)
    return stack


def how_to_try(url: str, *, needs_key: bool) -> str:
    """Where OpenAI's API is, and a command line that asks it."""
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    call = f"curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"OpenAI's API: {url}/v1\n  {call}"
