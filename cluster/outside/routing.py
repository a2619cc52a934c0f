"""A router in this process, in front of verifiers that run elsewhere (``router.verifiers``)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.models.target import ResolvedModel
from cluster.outside.links import verifier_links
from cluster.process.observing import Observing
from cluster.settings import component_configs
from cluster.settings.config import Settings
from cluster.verifiers.chosen_verifier import ChosenVerifier
from services.api.messages import RouterPort
from services.router.service import RouterService


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The router, and where its numbers and traces go."""

    router: RouterPort
    observing: Observing


@asynccontextmanager
async def routing(settings: Settings, model: ResolvedModel) -> AsyncIterator[Routing]:
    """Route during the block. The verifiers may come and go.

    Raises:
        ConfigurationError: the settings or the model's tokenizer cannot be used; says why.
    """
    config, observing, links = (
        component_configs.router_config(settings, model),
        Observing(settings, on_ray=False),
        verifier_links(settings),
    )
    router = RouterService(config, ChosenVerifier(links), observing.metrics)
    try:
        yield Routing(router=observing.router(router, model.name), observing=observing)
    finally:
        await router.stop()
        for link in links:
            await link.close()
        await observing.stop()
