"""The public servers in front of a router: gRPC and, where it is wanted, HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

from cluster.entry.ops import OpsEntry
from cluster.entry.port_claims import claim_port
from cluster.process.observing import Observing
from cluster.process.starting import begin_serving, end_serving
from cluster.settings import component_configs
from cluster.settings.config import Settings
from services.api.config import HttpConfig, PublicServerConfig, StoredResponses
from services.api.descriptors import make_room
from services.api.grpc.server import PublicServer, serve_public
from services.api.http.responses.responses_in_redis import ResponsesInRedis
from services.api.http.responses.stored_responses import ForgettingRouter, ResponsesInMemory, ResponseStore
from services.api.http.server import HttpServer, serve_http
from services.api.messages import RouterPort
from services.api.sockets import check_http, check_server
from services.privacy.even_router import EvenRouter


class Addresses(NamedTuple):
    """Where a service answers: the "host:port" of gRPC, and the URL of OpenAI's API, or None."""

    grpc: str
    http: str | None


class PublicEntry:
    """The servers of one router, running."""

    def __init__(self, grpc: PublicServer, http: HttpServer | None, ops: OpsEntry, closed_last: AsyncExitStack) -> None:
        self._grpc = grpc
        self._http = http
        self._ops = ops
        self._closed_last = closed_last
        self.addresses = Addresses(grpc.address, http.url if http is not None else None)

    async def stop(self) -> None:
        """Say NOT_SERVING, refuse calls a little later, and wait until running ones have finished."""
        self._ops.leaving = True
        await asyncio.gather(self._grpc.stop(), *([] if self._http is None else [self._http.stop()]))
        await self._closed_last.aclose()
        await self._ops.stop()
        end_serving()


async def open_entry(router: RouterPort, settings: Settings, observing: Observing, *, service: str = "") -> PublicEntry:
    """Start the servers.

    Args:
        service: names the service whose routers come and go beside this one, and share its named ports; empty: this router
            is the only one, whatever the settings say of replicas.

    Raises:
        ConfigurationError: an address is taken, or the settings do not allow a server; nothing is left running.
    """
    public, http = component_configs.server_config(settings), component_configs.http_config(settings)
    # A single router, too: Serve starts the one that replaces it while it drains.
    shared = bool(service)
    public = replace(public, shared=shared and (public.shared or public.port != 0))
    if http is not None:
        http = replace(http, public=replace(public, shared=shared and (public.shared or http.port != 0)))
    make_room(public, http=http is not None)
    store = None if http is None else _store_of(http.responses)
    router = EvenRouter(router if store is None else ForgettingRouter(router, store), public.privacy)
    # One gate, so that a key's limits count for both servers together.
    gate = observing.gate(public)
    async with AsyncExitStack() as started:
        closed_last = await started.enter_async_context(AsyncExitStack())
        closed_last.callback(gate.close)
        if store is not None:
            closed_last.push_async_callback(store.close)
        await _claim(closed_last, public, http, service)
        grpc = await serve_public(router, public, gate)
        started.push_async_callback(grpc.stop, 0)
        serving_http = None if http is None else await serve_http(router, http, gate, observing.gathered, store)
        if serving_http is not None:
            started.push_async_callback(serving_http.stop, 0)
        ops = OpsEntry(settings, observing.exposition, router)
        await ops.start(patient=shared)
        started.pop_all()
    begin_serving()
    return PublicEntry(grpc, serving_http, ops, closed_last)


@asynccontextmanager
async def opened_entry(router: RouterPort, settings: Settings, observing: Observing) -> AsyncIterator[Addresses]:
    """As ``open_entry``, during the block; gives where they answer."""
    entry = await open_entry(router, settings, observing)
    try:
        yield entry.addresses
    finally:
        await entry.stop()


async def _claim(claims: AsyncExitStack, public: PublicServerConfig, http: HttpConfig | None, service: str) -> None:
    """Claim the ports that are shared, until ``claims`` are closed."""
    wanted = []
    if public.shared:
        wanted.append((f"{public.host}:{public.port}", lambda: check_server(public, first=True)))
    if http is not None and http.public.shared:
        wanted.append((f"{http.host}:{http.port}", lambda: check_http(http, first=True)))
    for address, check in wanted:
        if (claim := await claim_port(address, service, check)) is not None:
            claims.callback(claim.close)


def _store_of(responses: StoredResponses) -> ResponseStore:
    return ResponsesInMemory(responses) if responses.redis_url is None else ResponsesInRedis(responses)


def how_to_try(url: str, *, needs_key: bool, page: bool) -> str:
    """Where OpenAI's API is, and a command line that asks it; with ``page``, where the page for browsers is."""
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    call = f"curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    shown = f"\nPage for browsers: {url}/" if page else ""
    return f"OpenAI's API: {url}/v1\n  {call}{shown}"
