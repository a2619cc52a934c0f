"""The components as Ray Serve deployments.

Serve places, watches and scales them, and carries one streaming call per generation from router to verifier. Token trees go
through the drafters' own gRPC servers, and the public API through the router's. Serve's gRPC proxy is not used: it would
bind to every interface, without TLS, without our limits and without the callers' deadlines (docs/operations.md).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group

from cluster import build
from cluster.broadcast import tell_all
from cluster.config import Placed, Settings
from cluster.models import ResolvedModel
from cluster.starting import START_FAILED
from services.client_api import RouterPort
from services.drafter.service import DrafterService
from services.links import serialised
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.grpc_retrieval import GrpcRetrievalLink, serve_retrieval
from services.links.public_server import serve_public
from speculation.errors import Internal, OutriderError, ResourceExhausted, Unavailable
from speculation.messages import Finished, ForgetTenant, GenerationRequest, Progress, VerifierCard

log = logging.getLogger(__name__)

# Serve's own default of 5 per replica would throttle; the verifier has its own queue.
_ONGOING = 4096
# Seconds between questions to a verifier that is still starting.
_ASK_AGAIN_S = 0.2


@contextmanager
def _telling_why() -> Iterator[None]:
    """Turn any error of the block into one marked line, which the starting process can find in Serve's messages."""
    try:
        yield
    except Exception as error:
        log.error("cannot start", exc_info=not isinstance(error, OutriderError))
        ours = _translate(error) if isinstance(error, (OutriderError, RayError, DeploymentUnavailableError)) else None
        text = str(ours or error) or type(error).__name__
        kind = type(ours).__name__ if ours is not None else type(error).__name__
        raise RuntimeError(START_FAILED + json.dumps([kind, text])) from None


class _Process:
    """Methods that all deployments have."""

    async def process_id(self) -> int:
        """The replica's process id, for monitoring and tests."""
        return os.getpid()


@serve.deployment(name="drafter", max_ongoing_requests=_ONGOING)
class DrafterDeployment(_Process):
    """A drafter with its own gRPC server."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, retrieval: DeploymentHandle | None
    ) -> None:
        with _telling_why():
            link = None
            if retrieval is not None:
                to_retrieval = retrieval

                async def resolve() -> str:
                    return cast(str, await to_retrieval.address.remote())

                link = GrpcRetrievalLink(resolve, settings.internal_token)
                await link.start()
            self._drafter = DrafterService(build.drafter_config(settings), link)
            host = settings.drafter.host
            self._server, port = await serve_drafter(
                self._drafter, f"{host}:0", settings.internal_token, settings.drafter.session_silence_s
            )
            self._address = f"{_reachable(host)}:{port}"

    async def address(self) -> str:
        """The "host:port" of its gRPC server."""
        return self._address

    async def forget(self, tenant: str) -> None:
        await self._drafter.forget(ForgetTenant(tenant=tenant))


@serve.deployment(name="retrieval", max_ongoing_requests=_ONGOING)
class RetrievalDeployment(_Process):
    """A retrieval service with its own gRPC server."""

    async def __init__(self, settings: Settings, model: ResolvedModel) -> None:  # type: ignore[misc]
        with _telling_why():
            from services.retrieval.service import RetrievalService

            self._retrieval = RetrievalService(build.retrieval_config(settings, model))
            await self._retrieval.start()
            host = settings.retrieval.host
            self._server, port = await serve_retrieval(self._retrieval, f"{host}:0", settings.internal_token)
            self._address = f"{_reachable(host)}:{port}"

    async def address(self) -> str:
        """The "host:port" of its gRPC server."""
        return self._address

    async def version(self) -> str | None:
        """The version of the index in use."""
        return self._retrieval.version


@serve.deployment(name="verifier", max_ongoing_requests=_ONGOING)
class VerifierDeployment(_Process):
    """A target with its decoding loop."""

    async def __init__(self, settings: Settings, model: ResolvedModel, drafter: DeploymentHandle) -> None:  # type: ignore[misc]
        with _telling_why():

            async def resolve() -> str:
                return cast(str, await drafter.address.remote())

            # Imported here because drafters start much faster without torch.
            from services.verifier.service import VerifierService

            link = GrpcDraftLink(resolve, settings.internal_token)
            config = build.verifier_config(settings, model)
            own = settings.verifier
            launch = None
            if own.stages > 1:
                from cluster.stage_actors import launcher_in

                launch = launcher_in(get_current_placement_group(), num_cpus=own.num_cpus, num_gpus=own.num_gpus)
            self._verifier = VerifierService(config, [build.origin(settings, link)], launch)
            await self._verifier.start()

    async def generate(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """As ``VerifierPort.generate``, with serialised messages of outrider.internal.v1."""
        events = self._verifier.generate(serialised.read_request(request))
        try:
            async for event in events:
                yield serialised.write_event(event)
        finally:
            await events.aclose()

    async def describe(self) -> bytes:
        return serialised.write_card(await self._verifier.describe())

    async def forget(self, tenant: str) -> None:
        await self._verifier.forget(tenant)

    async def running(self) -> int:
        """Number of requests being decoded or waiting."""
        return self._verifier.loop.running + self._verifier.loop.waiting

    async def loop_stats(self) -> dict[str, Any]:
        """``LoopStats`` as a dict."""
        return dataclasses.asdict(self._verifier.loop.stats)

    async def check_health(self) -> None:
        """Raise if the decoding loop has died, so that Serve replaces the replica."""
        if not self._verifier.alive:
            raise RuntimeError("the decoding loop is not running")


@serve.deployment(name="router", max_ongoing_requests=_ONGOING)
class RouterDeployment(_Process):
    """A router with the public gRPC server."""

    async def __init__(  # type: ignore[misc]
        self, settings: Settings, model: ResolvedModel, verifier: DeploymentHandle, drafter: DeploymentHandle
    ) -> None:
        with _telling_why():
            from services.router.service import RouterService

            router = RouterService(build.router_config(settings, model), ServeVerifierLink(verifier, drafter))
            # Open the public port only once requests can be answered.
            await _answered(router)
            self._server = await serve_public(router, build.server_config(settings))

    async def address(self) -> str:
        """The public "host:port"."""
        return self._server.address

    async def close(self) -> None:
        """Accept no more calls, and let running ones finish for a few seconds."""
        await self._server.stop()


async def _answered(router: RouterPort) -> None:
    """Wait until a verifier describes what it serves: loading a model takes time."""
    while True:
        try:
            await router.models()
            return
        except Unavailable as error:
            log.info("waiting for a verifier: %s", error)
        await asyncio.sleep(_ASK_AGAIN_S)


class ServeVerifierLink:
    """Implements ``speculation.ports.VerifierPort`` on Serve handles; ``forget`` reaches the drafters as well."""

    def __init__(self, handle: DeploymentHandle, drafters: DeploymentHandle) -> None:
        self._handle = handle
        self._drafters = drafters

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        events = self._handle.options(stream=True).generate.remote(serialised.write_request(request))
        finished = False
        try:
            async for event in events:
                message = serialised.read_event(event)
                finished = isinstance(message, Finished)
                yield message
        except Exception as error:
            raise _translate(error) from None
        finally:
            if not finished:
                events.cancel()

    async def describe(self) -> VerifierCard:
        try:
            wire = await self._handle.describe.remote()
        except Exception as error:
            raise _translate(error) from None
        return serialised.read_card(wire)

    async def forget(self, tenant: str) -> None:
        """Delete what is stored of a tenant's requests, at every replica.

        Drafters are told directly as well, since no verifier may be connected to one. The verifiers come first, so that
        afterwards none of them sends a drafter anything under the tenant's name.

        Raises:
            Unavailable: not all replicas have confirmed.
        """
        told = [await tell_all(handle, "forget", tenant) for handle in (self._handle, self._drafters)]
        if missed := [word for word in told if word is not None]:
            raise Unavailable(f"{'; '.join(missed)}; try again")


def _translate(error: Exception) -> OutriderError:
    """Convert errors raised by Ray, its own or wrapped ones of ours, to ours."""
    # Ray wraps a remote error in one whose text is the remote traceback; the original error is its cause.
    if isinstance(error, RayTaskError):
        error = cast(Any, error).cause
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, BackPressureError):
        return ResourceExhausted("too many requests wait for the verifier")
    if isinstance(error, (DeploymentUnavailableError, RayError)):
        return Unavailable("the verifier is gone or restarting; try again")
    log.error("the verifier failed", exc_info=error)
    return Internal("the verifier failed; the router's log says why")


def _reachable(host: str) -> str:
    """The host name at which other nodes reach a server bound to ``host``."""
    return str(ray.util.get_node_ip_address()) if host in ("0.0.0.0", "::", "[::]") else host


def application(settings: Settings, model: ResolvedModel) -> serve.Application:
    """The application: router, verifier, drafter and, if there is an index, retrieval."""
    retrieval = None
    if settings.retrieval.enabled:
        retrieval = _placed(RetrievalDeployment, settings.retrieval).bind(settings, model)
    drafter = _placed(DrafterDeployment, settings.drafter).bind(settings, retrieval)
    verifier = _placed(VerifierDeployment, settings.verifier).bind(settings, model, drafter)
    return _placed(RouterDeployment, settings.router).bind(settings, model, verifier, drafter)


def _placed(deployment: Any, component: Placed) -> serve.Deployment:
    resources = {"num_cpus": component.num_cpus, "num_gpus": component.num_gpus}
    # A replica that cannot start has wrong settings or a wrong model, so a second attempt would fail as well.
    options: dict[str, Any] = {
        "num_replicas": component.replicas,
        "ray_actor_options": resources,
        "max_constructor_retry_count": 1,
    }
    if component.processes > 1:
        bundle = {"CPU": component.num_cpus, "GPU": component.num_gpus}
        # Ray rejects empty bundles.
        bundle = {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}
        bundles = [bundle] * component.processes
        options |= {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    return cast(serve.Deployment, deployment.options(**options))
