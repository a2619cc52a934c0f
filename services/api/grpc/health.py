"""gRPC's health service, in which nobody who watches can hold up what is told to others."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health, health_pb2

from services.api.grpc.early import send
from services.links.status import Context

PERIOD_S = 1.0


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Answers Check, Watch, and List, which the library declares and does not have.

    Args:
        send_s: seconds within which a client must make room for a status.
    """

    def __init__(self, send_s: float) -> None:
        super().__init__()
        self._send_s = send_s

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        # The library writes to each client under a lock that a change of the status waits for.
        told = None
        while True:
            status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await send(context, health_pb2.HealthCheckResponse(status=status), self._send_s)
                told = status
            await asyncio.sleep(PERIOD_S)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)
