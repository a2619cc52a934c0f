"""A verifier outside of Ray: a process with a gRPC server, to which ``router.verifiers`` of a service leads.

Its drafter is in the same process, or at its own ``drafter.address``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster import build
from cluster.checks.host import refused_port
from cluster.models.target import ResolvedModel
from cluster.process.starting import begin_serving, end_serving
from cluster.settings.config import Settings
from cluster.settings.recognition import check_shared_secrets, server_tls, with_token
from services.links.grpc_verifier import serve_verifier
from services.links.tls.component_files import check_files

if TYPE_CHECKING:
    from services.verifier.service import VerifierService

# Seconds between two looks at the decoding loop.
_LOOK_S = 1.0


@asynccontextmanager
async def verifying(settings: Settings, model: ResolvedModel, lost: asyncio.Event | None = None) -> AsyncIterator[str]:
    """Verify for routers during the block; gives the "host:port". When it ends, answers have ``verifier.drain_s`` to finish.

    Args:
        lost: set when nothing will be decoded any more: the process should end, so that another one takes its place.

    Raises:
        ConfigurationError: the settings or the model cannot be used, or the address is taken; says why.
    """
    own = settings.verifier
    check_shared_secrets(settings, host=own.host)
    if (tls := server_tls(settings, "verifier")) is not None:
        tls = replace(tls, serves=True)
        check_files(tls)
    settings = with_token(settings)
    async with build.in_process(settings, model) as running:
        observing = running.observing
        with refused_port("verifier", own.host, own.port):
            server, port = await serve_verifier(
                observing.verifier(running.verifier),
                f"{own.host}:{own.port}",
                settings.internal_token,
                tls,
                observing.component(settings, "verifier"),
            )
        watching = asyncio.create_task(_watch(running.verifier, lost or asyncio.Event()))
        begin_serving()
        try:
            yield f"{own.host}:{port}"
        finally:
            end_serving()
            watching.cancel()
            await server.stop(own.drain_s)


async def _watch(verifier: VerifierService, lost: asyncio.Event) -> None:
    while verifier.alive:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)
    lost.set()
