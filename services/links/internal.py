"""gRPC servers between components, protected by a shared token."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from services.links.auth import ApiKeyInterceptor, hash_key
from services.links.channel import bind, make_server
from speculation import limits


async def serve_internal(
    add: Callable[[grpc.aio.Server], None], address: str, token: str | None
) -> tuple[grpc.aio.Server, int]:
    """Start a server at "host:port" (port 0: any free one). Returns it and its port.

    Args:
        add: adds the service to the server.
        token: asked for on every call; None: nothing is asked for.
    """
    guards = [ApiKeyInterceptor([hash_key(token)])] if token else []
    server = make_server(limits.MAX_DRAFT_MESSAGE_BYTES, interceptors=guards)
    add(server)
    port = bind(server, address)
    await server.start()
    return server, port
