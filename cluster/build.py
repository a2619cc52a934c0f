"""The composition root: makes components and connects them with links. Nothing else knows the topology."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.models.drafters import draft_models, noise_trial, stream_weights
from cluster.models.named_models import held_models
from cluster.models.target import ResolvedModel, before_products
from cluster.settings.component_configs import (
    drafter_beside_config,
    drafter_config,
    retrieval_config,
    router_config,
    verifier_config,
)
from cluster.settings.config import Settings
from services.verifier.engine.origins import Origin
from speculation.ports import DraftLink

if TYPE_CHECKING:
    from cluster.process.observing import Observing
    from services.api.messages import RouterPort
    from services.drafter.service import DrafterService
    from services.retrieval.service import RetrievalService
    from services.verifier.service import VerifierService


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """All components in one process.

    Attributes:
        observing: where their numbers and traces go.
    """

    drafter: DrafterService
    retrieval: RetrievalService | None
    verifier: VerifierService
    router: RouterPort
    observing: Observing


@asynccontextmanager
async def in_process(
    settings: Settings, model: ResolvedModel, *, between: Callable[[DraftLink], DraftLink] = lambda link: link
) -> AsyncIterator[Pipeline]:
    """Build all components in this process, run them during the block, and stop them.

    Args:
        between: puts something between the verifier and the drafter, to see or to disturb what they say.

    Raises:
        ConfigurationError: the settings or the model cannot be used; says why.
    """
    # These import gRPC, numpy and torch. Commands that only read settings, and drafters, start much faster without them.
    from cluster.outside.links import outside_link
    from cluster.process.observing import Observing
    from cluster.ray.stage_actors import launch_child
    from services.drafter.service import DrafterService
    from services.links.in_process import InProcessDraftLink, InProcessRetrievalLink, InProcessVerifierLink
    from services.router.service import RouterService
    from services.verifier.service import VerifierService

    # Reports wrong settings before anything is loaded.
    routing = router_config(settings, model)
    async with AsyncExitStack() as ended:
        observing = Observing(settings, on_ray=False)
        ended.push_async_callback(observing.stop)
        retrieval = None
        if settings.retrieval.enabled:
            from services.retrieval.service import RetrievalService

            retrieval = RetrievalService(retrieval_config(settings, model))
            ended.push_async_callback(retrieval.stop)
        link = None if retrieval is None else InProcessRetrievalLink(observing.retrieval(retrieval))
        answers = None if retrieval is None else retrieval.answers
        drafter = DrafterService(drafter_config(settings, model), link, answers=answers)
        ended.push_async_callback(drafter.stop)
        here = InProcessDraftLink(observing.drafter(drafter), settings.drafter.session_silence_s)
        link_to_drafter = between(outside_link(settings) or here)
        before_products(settings)
        await drafter.start()
        verifier = VerifierService(
            verifier_config(settings, model, in_process=True),
            await origins(settings, model, link_to_drafter, ended),
            launch_child,
            observing.metrics,
            stream_weights(settings, model),
            noise_trial(settings, model),
        )
        ended.push_async_callback(verifier.stop)
        router = RouterService(routing, InProcessVerifierLink(observing.verifier(verifier)), observing.metrics)
        ended.push_async_callback(router.stop)
        if retrieval is not None:
            await retrieval.start()
        await verifier.start()
        yield Pipeline(
            drafter=drafter,
            retrieval=retrieval,
            verifier=verifier,
            router=observing.router(router, model.name),
            observing=observing,
        )


async def origins(settings: Settings, model: ResolvedModel, link: DraftLink, ended: AsyncExitStack) -> list[Origin]:
    """The origins of a verifier's drafts.

    They are the drafter at the other end of ``link`` and, if models draft in the verifier's process, a drafter of their own,
    whose models are loaded here.

    Args:
        ended: stops that drafter. The verifier has to be stopped before.

    Raises:
        ConfigurationError: as ``drafter_config``; or a model cannot be used.
    """
    found = draft_models(settings, model) if settings.drafter.models_in == "verifier" else {}
    trained = frozenset(found)
    if not trained:
        return [Origin(name="the drafter", link=link, trusted=settings.drafter.trusted)]
    from services.drafter.service import DrafterService
    from services.links.in_process import InProcessDraftLink

    drafter = DrafterService(drafter_beside_config(settings, model))
    ended.push_async_callback(drafter.stop)
    before_products(settings)
    await drafter.start()
    beside = InProcessDraftLink(drafter, settings.drafter.session_silence_s)
    return [
        Origin(name="the drafter", link=link, trusted=settings.drafter.trusted, others=trained),
        Origin(
            name="the drafter beside the target",
            link=beside,
            trusted=True,
            sources=trained,
            models=held_models(settings, found),
        ),
    ]
