"""A drafter outside of Ray: a process with a gRPC server, to which ``drafter.address`` of a service leads.

A worker of a Ray can run code on every node of it. A drafter of this kind cannot: it gets the texts that it drafts for, and
nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.checks.host import refused_port
from cluster.models.target import ResolvedModel
from cluster.process.observing import Observing
from cluster.process.starting import begin_serving, end_serving
from cluster.settings import component_configs
from cluster.settings.config import Settings
from cluster.settings.recognition import check_shared_secrets, server_tls, with_token
from services.drafter.service import DrafterService
from services.links.grpc_draft import serve_drafter
from services.links.in_process import InProcessRetrievalLink
from services.links.tls.component_files import check_files

# Seconds that replies under way get when it stops.
_LAST_WORDS_S = 0.5


@asynccontextmanager
async def drafting(settings: Settings, model: ResolvedModel) -> AsyncIterator[str]:
    """Draft for verifiers during the block; gives the "host:port". Where there is an index, it is in this process.

    Raises:
        ConfigurationError: the settings or the model cannot be used, or the address is taken; says why.
    """
    own = settings.drafter
    check_shared_secrets(settings, host=own.host)
    if (tls := server_tls(settings, "drafter")) is not None:
        check_files(tls)
    settings = with_token(settings)
    observing = Observing(settings, on_ray=False, component="drafter")
    retrieval = None
    if settings.retrieval.enabled:
        from services.retrieval.service import RetrievalService

        retrieval = RetrievalService(component_configs.retrieval_config(settings, model))
    link = None if retrieval is None else InProcessRetrievalLink(observing.retrieval(retrieval))
    answers = None if retrieval is None else retrieval.answers
    drafter = DrafterService(component_configs.outside_drafter_config(settings, model), link, answers=answers)
    try:
        if retrieval is not None:
            await retrieval.start()
        await drafter.start()
        with refused_port("drafter", own.host, own.port):
            server, port = await serve_drafter(
                observing.drafter(drafter),
                f"{own.host}:{own.port}",
                settings.internal_token,
                own.session_silence_s,
                tls,
                observing.component(settings, "drafter"),
                component_configs.drafter_card(settings, model),
            )
        begin_serving()
        try:
            yield f"{own.host}:{port}"
        finally:
            end_serving()
            await server.stop(_LAST_WORDS_S)
    finally:
        await drafter.stop()
        if retrieval is not None:
            await retrieval.stop()
        await observing.stop()
