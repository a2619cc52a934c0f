"""gRPC servers between components, protected by a shared token and, where set, by mutual TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio

from services.access.key_records import hash_key
from services.access.refused_components import RefusedComponents
from services.links.auth import TokenInterceptor
from services.links.channel import bind, make_server
from services.links.guarded_calls import Guard
from services.links.status import Context, aborting
from services.links.tls.component_files import CALLERS, ComponentTls
from services.links.tls.mutual import check_caller, server_credentials
from speculation import limits


async def serve_internal(
    add: Callable[[grpc.aio.Server], None],
    address: str,
    token: str | None,
    tls: ComponentTls | None,
    refused: RefusedComponents,
    max_bytes: int = limits.MAX_DRAFT_MESSAGE_BYTES,
) -> tuple[grpc.aio.Server, int]:
    """Start a server at "host:port" (port 0: any free one). Returns it and its port.

    Args:
        add: adds the service to the server.
        token: asked for on every call; None: nothing is asked for.
        tls: the server's files; None: plain text.
        refused: where refused calls are told.
        max_bytes: largest message.
    """
    guards = [TokenInterceptor(hash_key(token), refused)] if token else []
    server = make_server(max_bytes, interceptors=guards)
    add(server)
    port = bind(server, address, None if tls is None else server_credentials(tls))
    await server.start()
    return server, port


def guard_of(tls: ComponentTls | None, refused: RefusedComponents) -> Guard:
    """What a servicer answers every call within.

    A caller whose certificate is not of a role that may call it is refused. What the answer raises ends the call with the
    matching status.
    """

    @asynccontextmanager
    async def guard(context: Context) -> AsyncIterator[None]:
        async with aborting(context):
            if tls is not None:
                check_caller(context, CALLERS[tls.role], refused)
            yield

    return guard
