"""The components as Ray Serve deployments.

Serve places, watches and scales them, and carries one streaming call per generation from router to verifier. Token trees go
through the drafters' own gRPC servers, and the public API through the router's. Serve's gRPC proxy is not used: it would
bind to every interface, without TLS, without our limits and without the callers' deadlines (docs/how-to/scaling.md).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group
from typing_extensions import override

from cluster import build
from cluster.models.drafters import noise_trial, stream_weights
from cluster.models.target import ResolvedModel
from cluster.outside.links import outside_link, verifier_links
from cluster.process.logs import start_logging
from cluster.process.observing import Observing
from cluster.process.starting import begin_serving, begin_starting
from cluster.ray.calling_routers import CallingRouters
from cluster.ray.peers import Peers, own_rank, peers_of
from cluster.ray.scaling import BusyCores, LoopLag
from cluster.ray.serve_link import ServeVerifierLink, translate
from cluster.ray.shared_weights import go_on_asking, take_weights_of_others
from cluster.ray.starting import START_FAILED
from cluster.settings import component_configs
from cluster.settings.config import Settings
from cluster.settings.recognition import caller_tls, server_tls
from cluster.verifiers.chosen_verifier import ChosenVerifier
from services.api.messages import RouterPort
from services.drafter.service import DrafterService
from services.links import serialised
from services.links.grpc_answers import GrpcAnswersLink, serves
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.grpc_retrieval import GrpcRetrievalLink, serve_retrieval
from services.retrieval.config import AnswersConfig
from services.settings import filled
from speculation.errors import OutriderError, Unavailable
from speculation.messages import ForgetTenant
from speculation.ports import DraftLink

if TYPE_CHECKING:
    from cluster.entry.public import Addresses

log = logging.getLogger(__name__)

# Serve's own default of 5 per replica would throttle; the verifier has its own queue.
_ONGOING = 4096
# Seconds that a drafter's replies under way get when it stops.
_LAST_WORDS_S = 0.5
# Seconds between questions to a verifier that is still starting.
_ASK_AGAIN_S = 0.2


@contextmanager
def _telling_why(settings: Settings) -> Iterator[None]:
    """Start the replica's log, and turn any error of the block, which makes the component, into one marked line.

    The starting process can find it in Serve's messages.
    """
    # Serve has put its own log in the place of stderr.
    start_logging(settings.logging, sys.__stderr__)
    begin_starting()
    try:
        yield
        begin_serving()
    except Exception as error:
        log.error("the component cannot start", exc_info=not isinstance(error, OutriderError))
        ours = translate(error) if isinstance(error, (OutriderError, RayError, DeploymentUnavailableError)) else None
        text = str(ours or error) or type(error).__name__
        kind = type(ours).__name__ if ours is not None else type(error).__name__
        raise RuntimeError(START_FAILED + json.dumps([kind, text])) from None


class _Process:
    """Methods that all deployments have."""

    # Ends what runs, the last first. Serve calls a destructor after a failed ``__init__``, too.
    _ended: AsyncExitStack | None = None

    async def process_id(self) -> int:
        """The replica's process id, for monitoring and tests."""
        return os.getpid()

    async def close(self) -> None:
        """End what runs, and keep what was learnt."""
        if self._ended is not None:
            await self._ended.aclose()

    async def __del__(self) -> None:
        """As ``close``: Ray Serve awaits this before it ends a replica, but does not count the calls of our own servers."""
        await self.close()


class _DraftServer(_Process):
    """Methods of components that others reach at a gRPC server of their own."""

    _address: str
    _busy: BusyCores

    async def address(self) -> str:
        """The "host:port" of its gRPC server."""
        return self._address

    async def place(self) -> tuple[int, str]:
        """Its number among the replicas, and its address."""
        return own_rank(), self._address

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that ``cluster.ray.scaling.processes`` judges."""
        return {"busy": self._busy.since_last()}


@serve.deployment(name="drafter", max_ongoing_requests=_ONGOING)
class DrafterDeployment(_DraftServer):
    """A drafter with its own gRPC server."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, model: ResolvedModel, retrieval: DeploymentHandle | None
    ) -> None:
        with _telling_why(settings):
            self._ended = AsyncExitStack()
            observing = Observing(settings, on_ray=True, component="drafter")
            link = answers = None
            if retrieval is not None:
                peers = peers_of(retrieval)
                link = GrpcRetrievalLink(peers.address, settings.internal_token, caller_tls(settings, "drafter"))
                await link.start()
                if filled(AnswersConfig, settings.retrieval).max_tokens:
                    answers = GrpcAnswersLink(link, settings.internal_token)
                self._following = asyncio.create_task(peers.follow(link.reconnect), name="follow-retrieval")
            self._busy = BusyCores()
            self._drafter = DrafterService(component_configs.drafter_config(settings, model), link, answers=answers)
            self._ended.push_async_callback(self._drafter.stop)
            await self._drafter.start()
            host, silence_s = settings.drafter.host, settings.drafter.session_silence_s
            server, port = await serve_drafter(
                observing.drafter(self._drafter),
                f"{host}:0",
                settings.internal_token,
                silence_s,
                server_tls(settings, "drafter"),
                observing.component(settings, "drafter"),
            )
            self._ended.push_async_callback(server.stop, _LAST_WORDS_S)
            self._address = f"{_reachable(host)}:{port}"

    async def forget(self, tenant: str) -> None:
        await self._drafter.forget(ForgetTenant(tenant=tenant))


@serve.deployment(name="retrieval", max_ongoing_requests=_ONGOING)
class RetrievalDeployment(_DraftServer):
    """A retrieval service with its own gRPC server."""

    async def __init__(self, settings: Settings, model: ResolvedModel) -> None:  # type: ignore[misc]
        with _telling_why(settings):
            from services.retrieval.service import RetrievalService

            self._ended, self._busy = AsyncExitStack(), BusyCores()
            self._retrieval = RetrievalService(component_configs.retrieval_config(settings, model))
            self._ended.push_async_callback(self._retrieval.stop)
            await self._retrieval.start()
            host = settings.retrieval.host
            observing = Observing(settings, on_ray=True, component="retrieval")
            observed, refused = observing.retrieval(self._retrieval), observing.component(settings, "retrieval")
            tls = server_tls(settings, "retrieval")
            further = serves(self._retrieval.answers)
            server, port = await serve_retrieval(observed, f"{host}:0", settings.internal_token, tls, refused, further)
            self._ended.push_async_callback(server.stop, _LAST_WORDS_S)
            self._address = f"{_reachable(host)}:{port}"

    async def version(self) -> str | None:
        """The version of the index in use."""
        return self._retrieval.version


@serve.deployment(name="verifier", max_ongoing_requests=_ONGOING)
class VerifierDeployment(_Process):
    """A target with its decoding loop."""

    async def __init__(  # type: ignore[misc]
        self, settings: Settings, model: ResolvedModel, drafter: DeploymentHandle | None
    ) -> None:
        with _telling_why(settings):
            # Imported here because drafters start much faster without torch.
            from services.verifier.service import VerifierService

            self._outside = settings.drafter.address
            link = self._link_to(drafter, settings)
            settings = with_own_stage_host(settings)
            config, own = component_configs.verifier_config(settings, model), settings.verifier
            launch = None
            if own.processes > 1:
                from cluster.ray.stage_actors import launcher_in

                launch = launcher_in(get_current_placement_group(), num_cpus=own.num_cpus, num_gpus=own.num_gpus)
            self._rows = own.max_num_seqs
            observing = Observing(settings, on_ray=True, component="verifier")
            # It has no server to refuse anybody at, but shows its certificate.
            observing.component(settings, "verifier")
            self._ended = AsyncExitStack()
            origins = await build.origins(settings, model, link, self._ended)
            streams, noise = stream_weights(settings, model), noise_trial(settings, model)
            self._verifier = VerifierService(config, origins, launch, observing.metrics, streams, noise)
            self._ended.push_async_callback(self._verifier.stop)
            self._observed = observing.verifier(self._verifier)
            await self._verifier.start()
            ask_others = partial(take_weights_of_others, self._verifier.take_weights)
            await ask_others()
            if config.weights_from:
                asking = go_on_asking(self._verifier.replaced_weights, ask_others)
                self._asking = asyncio.create_task(asking, name="weights-of-others")
            self._callers = CallingRouters()
            self._watching = asyncio.create_task(self._callers.watch(), name="silent-routers")

    def _link_to(self, drafters: DeploymentHandle | None, settings: Settings) -> DraftLink:
        """The link to one of the service's drafters, or to the one that runs elsewhere."""
        self._drafters: Peers | None = None
        if drafters is None:
            outside = outside_link(settings)
            assert outside is not None
            return outside
        self._drafters = peers = peers_of(drafters)
        link = GrpcDraftLink(peers.address, settings.internal_token, caller_tls(settings, "verifier"))
        self._following = asyncio.create_task(peers.follow(link.reconnect), name="follow-drafters")
        return link

    async def generate(self, request: bytes, caller: str) -> AsyncGenerator[bytes, None]:
        """As ``VerifierPort.generate``, with serialised messages; ends if ``caller``, a router, falls silent."""
        events = self._observed.generate(serialised.REQUEST.read(request))
        try:
            with self._callers.answering(caller):
                async for event in events:
                    yield await serialised.write_event(event)
        finally:
            await events.aclose()

    async def caller_lives(self, caller: str) -> None:
        """A router with open streams says that it lives."""
        self._callers.heard(caller)

    async def compare(self, request: bytes) -> bytes:
        """As ``VerifierPort.compare``, with serialised messages."""
        return serialised.COMPARISONS.write(await self._observed.compare(*serialised.COMPARING.read(request)))

    async def describe(self) -> bytes:
        return serialised.CARD.write(await self._verifier.describe())

    async def forget(self, tenant: str) -> None:
        await self._verifier.forget(tenant)

    async def adapt(self, order: bytes) -> str:
        """As ``VerifierPort.adapt``, with a serialised order."""
        return await self._verifier.adapt(serialised.ADAPTING.read(order))

    async def reload(self, order: bytes) -> str:
        """As ``VerifierPort.reload``, with a serialised message."""
        return await self._verifier.reload(serialised.RELOAD.read(order))

    async def replaced_weights(self) -> tuple[str, str]:
        """As ``VerifierService.replaced_weights``."""
        return await self._verifier.replaced_weights()

    async def running(self) -> int:
        """Number of requests being decoded or waiting."""
        return self._verifier.loop.running + self._verifier.loop.waiting

    async def drafter_address(self) -> str | None:
        """The "host:port" of the drafter that it is connected to, or tries to be."""
        return self._outside if self._drafters is None else self._drafters.current

    async def loop_stats(self) -> dict[str, Any]:
        """``LoopStats`` as a dict."""
        return dataclasses.asdict(self._verifier.loop.stats)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that ``cluster.ray.scaling.verifiers`` judges."""
        loop = self._verifier.loop
        return {"rows": loop.running / self._rows, "waiting": loop.waiting, "cache": self._verifier.cache_use}

    async def check_health(self) -> None:
        """Raise if the decoding loop has died, so that Serve replaces the replica."""
        if not self._verifier.alive:
            raise RuntimeError("the decoding loop is not running")


@serve.deployment(name="router", max_ongoing_requests=_ONGOING)
class RouterDeployment(_Process):
    """A router with the public servers."""

    async def __init__(  # type: ignore[misc]
        self, settings: Settings, model: ResolvedModel, verifier: DeploymentHandle | None, drafter: DeploymentHandle | None
    ) -> None:
        with _telling_why(settings):
            # Imported here because other components start faster without the API's servers.
            from cluster.entry.public import open_entry
            from services.router.service import RouterService

            observing = Observing(settings, on_ray=True, component="router")
            outside = verifier is None
            self._link = ChosenVerifier(verifier_links(settings)) if outside else ServeVerifierLink(verifier, drafter)
            self._lag = LoopLag()
            router = observing.router(
                RouterService(component_configs.router_config(settings, model), self._link, observing.metrics), model.name
            )
            # Open the public ports only once requests can be answered.
            await _answered(router)
            service = f"{ray.get_runtime_context().gcs_address}/{settings.cluster.name}"
            self._entry = await open_entry(router, settings, observing, service=service)

    async def addresses(self) -> Addresses:
        """Where it answers."""
        return self._entry.addresses

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that ``cluster.ray.scaling.routers`` judges."""
        return {"streams": self._link.streams, "lag_s": self._lag.since_last()}

    @override
    async def close(self) -> None:
        """Say NOT_SERVING, refuse calls a little later, and wait until running ones have finished."""
        if hasattr(self, "_entry"):
            await self._entry.stop()

    async def leave(self, node_id: str) -> bool:
        """As ``close``, if this router is on that node of Ray's; whether it is."""
        if ray.get_runtime_context().get_node_id() != node_id:
            return False
        await self.close()
        return True


async def _answered(router: RouterPort) -> None:
    """Wait until a verifier describes what it serves: loading a model takes time."""
    while True:
        try:
            await router.models()
            return
        except Unavailable as error:
            log.info("waiting for a verifier: %s", error)
        await asyncio.sleep(_ASK_AGAIN_S)


def with_own_stage_host(settings: Settings) -> Settings:
    """``settings`` with this node's address in the place of 0.0.0.0, where a verifier's stages find each other."""
    own = settings.verifier.model_copy(update={"stage_host": _reachable(settings.verifier.stage_host)})
    return settings.model_copy(update={"verifier": own})


def _reachable(host: str) -> str:
    """The host name at which other nodes reach a server bound to ``host``."""
    return str(ray.util.get_node_ip_address()) if host in ("0.0.0.0", "::", "[::]") else host
