"""Servers of components for each other: our limits, and the token that they share."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from services.links.auth import ApiKeyInterceptor, hash_key
from services.links.channel import bind, make_server
from speculation import limits


async def serve_internal(
    add: Callable[[grpc.aio.Server], None], address: str, token: str | None
) -> tuple[grpc.aio.Server, int]:
    """Start a server at "host:port" (port 0: any) that asks for ``token``; returns it and its port.

    Args:
        add: puts the service on the server.
    """
    guards = [ApiKeyInterceptor([hash_key(token)])] if token else []
    server = make_server(limits.MAX_DRAFT_MESSAGE_BYTES, interceptors=guards)
    add(server)
    port = bind(server, address)
    await server.start()
    return server, port
