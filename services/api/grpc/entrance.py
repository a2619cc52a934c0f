"""What a public call must pass before its method sees it: a key, a seat, and a message without unknown fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from services.access.gate import Gate
from services.api.grpc.known_fields import only_known
from services.links.auth import bearer_of
from services.links.guarded_calls import Context, Handler, Next, wrapped
from speculation.errors import ResourceExhausted

# Only Check is exempt: a Watch call never ends, so anyone could use up the server's concurrent calls with them.
_HEALTH = "/grpc.health.v1.Health/Check"


class PublicEntrance(grpc.aio.ServerInterceptor):
    """Lets in calls with a valid key while there is a seat; health checks always.

    Args:
        most: calls at once.
    """

    def __init__(self, gate: Gate, most: int) -> None:
        self._gate = gate
        self._most = most
        self._running = 0

    async def intercept_service(self, continuation: Next, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == _HEALTH:
            return handler
        # Of the public methods, reflection alone takes a stream.
        return wrapped(handler, self._guard, only_known, handler.request_deserializer)

    @asynccontextmanager
    async def _guard(self, context: Context) -> AsyncIterator[None]:
        self._gate.caller(bearer_of(context.invocation_metadata()), context.peer())
        if self._running >= self._most:
            raise ResourceExhausted(f"{self._running} calls are under way already (max_concurrent_requests)")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
