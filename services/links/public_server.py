"""The public gRPC server in front of a router: generation, health, reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from services.client_api import RouterPort
from services.links.auth import ApiKeyInterceptor, tenant_of
from services.links.channel import bind, make_server
from services.links.config import PublicServerConfig, check_server
from services.links.public import decode_request, encode_event, encode_models
from services.links.request_names import REQUEST_ID, request_id_of, traceparent_of
from services.links.status import aborting
from speculation import limits

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_HEALTH_PERIOD_S = 2.0


class _GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, router: RouterPort) -> None:
        self._router = router

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with aborting(context):
            metadata = context.invocation_metadata()
            request_id = request_id_of(metadata)
            # Sent first, so that the caller has the request id of a call that fails as well.
            await context.send_initial_metadata(((REQUEST_ID, request_id),))
            asked = decode_request(
                request, tenant=tenant_of(metadata), request_id=request_id, traceparent=traceparent_of(metadata)
            )
            events = self._router.generate(asked)
            try:
                async for event in events:
                    yield encode_event(event)
            finally:
                await events.aclose()

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        async with aborting(context):
            return encode_models(await self._router.models())

    async def Forget(self, request: pb.ForgetRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ForgetResponse:
        async with aborting(context):
            await self._router.forget(tenant_of(context.invocation_metadata()))
            return pb.ForgetResponse()


class PublicServer:
    """A running public server.

    Attributes:
        address: the "host:port" that it listens on.
    """

    def __init__(
        self, router: RouterPort, server: grpc.aio.Server, health_servicer: health.aio.HealthServicer, address: str
    ) -> None:
        self._router = router
        self._server = server
        self._health = health_servicer
        self._watch = asyncio.create_task(self._follow_router(), name="health")
        self.address = address

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report NOT_SERVING, let running calls finish for ``grace_s`` seconds, then end them."""
        self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _follow_router(self) -> None:
        """Report SERVING while the router would answer requests, else NOT_SERVING."""
        while True:
            try:
                ready = await self._router.ready()
            except Exception:
                log.exception("the router's readiness could not be checked")
                ready = False
            status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
            for service in (SERVICE, ""):
                await self._health.set(service, status)
            await asyncio.sleep(_HEALTH_PERIOD_S)


async def serve_public(router: RouterPort, config: PublicServerConfig) -> PublicServer:
    """Start the public server.

    Raises:
        ConfigurationError: see ``check_server``.
    """
    check_server(config)
    interceptors = [ApiKeyInterceptor(config.api_key_hashes)] if config.api_key_hashes else []
    server = make_server(
        limits.MAX_PUBLIC_MESSAGE_BYTES, max_concurrent=config.max_concurrent_requests, interceptors=interceptors
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(_GenerationServicer(router), server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if config.reflection:
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = bind(server, f"{config.host}:{config.port}", config.tls)
    await server.start()
    return PublicServer(router, server, health_servicer, f"{config.host}:{port}")
