"""The public gRPC server in front of a router: generation, health, reflection."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from functools import partial

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from typing_extensions import override

from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from services.access.charges import nameable
from services.access.gate import Gate, open_gate
from services.api.config import PublicServerConfig, public_files
from services.api.grpc.early import LARGE, send
from services.api.grpc.entrance import PublicEntrance, current_caller
from services.api.grpc.health import PERIOD_S, HealthService
from services.api.grpc.messages import decode_pause, decode_reload, decode_request, encode_events, encode_models
from services.api.messages import RouterPort
from services.api.readiness import Readiness
from services.api.sockets import check_server
from services.api.told_headers import told_headers
from services.links.channel import Options, bind, make_server
from services.links.request_names import REQUEST_ID, request_id_of, traceparent_of
from services.links.status import Context, aborting
from services.links.tls.mutual import renewed_credentials
from speculation import limits

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
# Names for health checks. "" and the service's own name are about readiness, as gRPC's convention has it.
LIVENESS, READINESS = "liveness", "readiness"
_REFUSED_AT_ONCE = 256
_READY = ("", SERVICE, READINESS)


class _GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, router: RouterPort, gate: Gate, config: PublicServerConfig) -> None:
        self._router = router
        self._gate = gate
        self._send_timeout_s = config.send_timeout_s
        self._privacy = config.privacy

    # It writes instead of yielding, so that it can give up a client that reads nothing.
    @override
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        async with aborting(context):
            metadata = context.invocation_metadata()
            request_id = request_id_of(metadata)
            # Sent first, so that the caller has the request id of a call that fails as well; and last, because the asyncio
            # client of gRPC drops the first metadata of a call whose status it has read before them.
            named = ((REQUEST_ID, request_id),)
            context.set_trailing_metadata(named)
            await context.send_initial_metadata(named)
            caller = current_caller.get()
            decode = partial(
                decode_request,
                request,
                tenant=caller.tenant,
                request_id=request_id,
                traceparent=traceparent_of(metadata),
                headers=told_headers(metadata),
            )
            asked = await asyncio.to_thread(decode) if request.ByteSize() > LARGE else decode()
            padding = self._privacy.padding(asked.private)
            async with self._gate.admit(caller, asked) as visit, aclosing(self._router.generate(visit.request)) as events:
                async for event in events:
                    visit.note(event)
                    for message in encode_events(event, padding):
                        await send(context, message, self._send_timeout_s)

    @override
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async with aborting(context):
            caller = current_caller.get()
            with self._gate.counted(caller, "ListModels"):
                cards = await self._router.models(caller.tenant)
                return encode_models([nameable(caller.limits, card) for card in cards])

    @override
    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        async with aborting(context):
            caller = current_caller.get()
            with self._gate.counted(caller, "Forget", scope="forget"):
                await self._router.forget(caller.tenant)
                return pb.ForgetResponse()

    @override
    async def Reload(self, request: pb.ReloadRequest, context: Context) -> pb.ReloadResponse:
        async with aborting(context):
            with self._gate.counted(current_caller.get(), "Reload", scope="admin"):
                notes = await self._router.reload(*decode_reload(request))
                return pb.ReloadResponse(arithmetic=(await self._router.models())[0].arithmetic, notes=notes)

    @override
    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        async with aborting(context):
            with self._gate.counted(current_caller.get(), "Pause", scope="admin"):
                await self._router.pause(*decode_pause(request))
                return pb.PauseResponse()

    @override
    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        async with aborting(context):
            with self._gate.counted(current_caller.get(), "Resume", scope="admin"):
                await self._router.resume()
                return pb.ResumeResponse()


class PublicServer:
    """A running public server.

    Attributes:
        address: the "host:port" that it listens on.
    """

    def __init__(
        self,
        router: RouterPort,
        server: grpc.aio.Server,
        health_servicer: HealthService,
        address: str,
        config: PublicServerConfig,
    ) -> None:
        self._readiness = Readiness(router)
        self._server = server
        self._health = health_servicer
        self._config = config
        self._watch = asyncio.create_task(self._follow_router(), name="health")
        self.address = address

    async def stop(self, grace_s: float | None = None, delay_s: float | None = None) -> None:
        """Report NOT_SERVING, wait for balancers to see it, accept no more calls, and give running ones time to end.

        Args:
            grace_s: seconds for running calls; None: both times as configured.
            delay_s: seconds for balancers; None: none, unless both times are as configured.
        """
        self._watch.cancel()
        await self._tell(ready=False)
        if delay_s is None:
            delay_s = self._config.drain_delay_s if grace_s is None else 0.0
        await asyncio.sleep(delay_s)
        await self._server.stop(self._config.drain_grace_s if grace_s is None else grace_s)
        await self._readiness.stop()

    async def _follow_router(self) -> None:
        """Report SERVING while the router would answer requests, else NOT_SERVING. What is told is what was seen last."""
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        while True:
            await self._tell(ready=await self._readiness.ready())
            await asyncio.sleep(PERIOD_S)

    async def _tell(self, *, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in _READY:
            await self._health.set(service, status)


async def serve_public(router: RouterPort, config: PublicServerConfig, gate: Gate | None = None) -> PublicServer:
    """Start the public server.

    Args:
        gate: shared with other public servers of the process; None: one of its own, from ``config``.

    Raises:
        ConfigurationError: see ``check_server``.
    """
    check_server(config)
    gate = gate or open_gate(config.api_key_hashes, config.keys_file, config.audit_log)
    server = make_server(
        limits.MAX_PUBLIC_MESSAGE_BYTES,
        interceptors=[PublicEntrance(gate, config)],
        options=_limits_of_clients(config),
        shared=config.shared,
    )
    servicer = _GenerationServicer(router, gate, config)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health_servicer = HealthService(config.send_timeout_s)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if config.reflection:
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    credentials = None if config.tls is None else renewed_credentials(public_files(config.tls))
    port = bind(server, f"{config.host}:{config.port}", credentials)
    await server.start()
    return PublicServer(router, server, health_servicer, f"{config.host}:{port}", config)


def _limits_of_clients(config: PublicServerConfig) -> Options:
    """Server options against clients that take connections and leave them unused."""
    return [
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_connection_idle_ms", round(1000 * config.idle_timeout_s)),
        # Calls under way go on as long as they take.
        ("grpc.max_connection_age_ms", round(1000 * config.max_connection_age_s)),
        ("grpc.server_handshake_timeout_ms", 5_000),
        # A connection has no use for more than the server answers at once; what is refused beyond that is answered, too.
        ("grpc.max_concurrent_streams", config.max_concurrent_requests + _REFUSED_AT_ONCE),
    ]
