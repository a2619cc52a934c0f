"""The components as Ray Serve deployments.

Serve places, watches and scales them, and carries one streaming call per generation from router to verifier. Token trees go
over the drafters' own gRPC servers; so does the public API, over the router's (serve's gRPC proxy would bind to every
interface, without TLS, without our limits and without the callers' deadlines: docs/operations.md).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster import build
from cluster.config import Placed, Settings
from cluster.models import ResolvedModel
from outrider.internal.v1 import verification_pb2
from services.drafter.service import DrafterService
from services.links.codec import verification as codec
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.public_server import serve_public
from services.router.service import RouterService
from services.verifier.service import VerifierService
from speculation.errors import Internal, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard

log = logging.getLogger(__name__)

APPLICATION = "outrider"
# Serve's own default, 5 at once per replica, would throttle: the verifier has its own queue.
_ONGOING = 4096


@serve.deployment(name="drafter", max_ongoing_requests=_ONGOING)
class DrafterDeployment:
    """A drafter with its own gRPC server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._drafter = DrafterService(build.drafter_config(settings))
        self._address: str | None = None

    async def address(self) -> str:
        """Where it answers; starts the server at the first call, on the event loop that serves it."""
        if self._address is None:
            host = self._settings.drafter.host
            self._server, port = await serve_drafter(self._drafter, f"{host}:0")
            self._address = f"{_reachable(host)}:{port}"
        return self._address

    async def process_id(self) -> int:
        """For those who want to watch it, or to kill it."""
        return os.getpid()


@serve.deployment(name="verifier", max_ongoing_requests=_ONGOING)
class VerifierDeployment:
    """A target with its decoding loop."""

    def __init__(self, settings: Settings, model: ResolvedModel, drafter: DeploymentHandle) -> None:
        async def resolve() -> str:
            return cast(str, await drafter.address.remote())

        self._verifier = VerifierService(build.verifier_config(settings, model), GrpcDraftLink(resolve))
        self._started = False

    async def generate(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """See ``VerifierPort.generate``; the messages are outrider.internal.v1's, serialised."""
        await self._start()
        wire = verification_pb2.VerifyRequest.FromString(request)
        events = self._verifier.generate(codec.decode_generation(wire))
        try:
            async for event in events:
                yield codec.encode_generation_event(event).SerializeToString()
        finally:
            await events.aclose()

    async def describe(self) -> bytes:
        """See ``VerifierPort.describe``."""
        await self._start()
        return codec.encode_card(await self._verifier.describe()).SerializeToString()

    async def step_times(self) -> dict[str, float]:
        """Milliseconds per step of each part of the loop."""
        return self._verifier.loop.stats.times.milliseconds_per_step()

    async def check_health(self) -> None:
        """Fails when the decoding loop has died, so that Serve replaces the replica."""
        if self._started and not self._verifier.healthy:
            raise RuntimeError("the decoding loop is not running")

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._verifier.start()


@serve.deployment(name="router", max_ongoing_requests=_ONGOING)
class RouterDeployment:
    """A router with the public gRPC server."""

    def __init__(self, settings: Settings, model: ResolvedModel, verifier: DeploymentHandle) -> None:
        self._settings = settings
        self._router = RouterService(build.router_config(settings, model), ServeVerifierLink(verifier))
        self._address: str | None = None

    async def address(self) -> str:
        """Where users reach it; opens the public server at the first call, once the verifier answers."""
        if self._address is None:
            await self._router.models()
            self._server = await serve_public(self._router, build.server_config(self._settings))
            self._address = self._server.address
        return self._address

    async def close(self) -> None:
        """Let running calls finish for a few seconds and accept no more."""
        if self._address is not None:
            await self._server.stop()


class ServeVerifierLink:
    """Implements ``speculation.ports.VerifierPort`` on a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        """See ``VerifierPort``."""
        wire = codec.encode_generation(request).SerializeToString()
        events = self._handle.options(stream=True).generate.remote(wire)
        finished = False
        try:
            async for event in events:
                message = codec.decode_generation_event(verification_pb2.VerifyResponse.FromString(event))
                finished = isinstance(message, Finished)
                yield message
        except Exception as error:
            raise _translate(error) from error
        finally:
            if not finished:
                events.cancel()

    async def describe(self) -> VerifierCard:
        """See ``VerifierPort``."""
        try:
            wire = await self._handle.describe.remote()
        except Exception as error:
            raise _translate(error) from error
        return codec.decode_card(verification_pb2.DescribeResponse.FromString(wire))


def _translate(error: Exception) -> OutriderError:
    """What Ray makes of our errors, and its own, as ours."""
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, RayTaskError):
        cause = cast(Any, error).cause
        return cause if isinstance(cause, OutriderError) else Internal("the verifier failed; its log says why")
    if isinstance(error, BackPressureError):
        return ResourceExhausted("too many requests wait for the verifier")
    if isinstance(error, (DeploymentUnavailableError, RayError)):
        return Unavailable("the verifier is gone or restarting; try again")
    log.error("unexpected error from the verifier", exc_info=error)
    return Internal("the verifier failed; the router's log says why")


def _reachable(host: str) -> str:
    """Where other nodes reach a server that is bound to ``host``."""
    return str(ray.util.get_node_ip_address()) if host == "0.0.0.0" else host


def application(settings: Settings, model: ResolvedModel) -> serve.Application:
    """Router, verifier and drafter, bound together."""
    drafter = _placed(DrafterDeployment, settings.drafter).bind(settings)
    verifier = _placed(VerifierDeployment, settings.verifier).bind(settings, model, drafter)
    return _placed(RouterDeployment, settings.router).bind(settings, model, verifier)


def _placed(deployment: Any, component: Placed) -> serve.Deployment:
    resources = {"num_cpus": component.num_cpus, "num_gpus": component.num_gpus}
    return cast(serve.Deployment, deployment.options(num_replicas=component.replicas, ray_actor_options=resources))
