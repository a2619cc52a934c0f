"""The whole service in this process: in-process links, a public server, and an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from cluster import build
from cluster.checks.host import check_gpus
from cluster.checks.preflight import preflight
from cluster.entry.public import Addresses, opened_entry
from cluster.models.target import ResolvedModel
from cluster.outside.routing import routing
from cluster.settings.config import Settings
from speculation.ports import DraftLink

Between = Callable[[DraftLink], DraftLink]


@contextmanager
def running_in_process(
    settings: Settings, model: ResolvedModel, *, between: Between = lambda link: link
) -> Iterator[Addresses]:
    """Serve during the block; yields where.

    Args:
        between: as ``build.in_process`` has it.

    Raises:
        ConfigurationError: the settings or the model are unusable; says why.
    """
    preflight(settings, model)
    if not settings.router.verifiers:
        check_gpus(settings.verifier.device, settings.verifier.stages, settings.verifier.tensor_parallel_size)
    ready: Future[tuple[Addresses, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(settings, model, between, ready)), name="outrider", daemon=True
    )
    thread.start()
    addresses, loop, stop = ready.result()
    try:
        yield addresses
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _serve(
    settings: Settings,
    model: ResolvedModel,
    between: Between,
    ready: Future[tuple[Addresses, asyncio.AbstractEventLoop, asyncio.Event]],
) -> None:
    stop = asyncio.Event()
    try:
        elsewhere = bool(settings.router.verifiers)
        async with (
            routing(settings, model) if elsewhere else build.in_process(settings, model, between=between) as running,
            opened_entry(running.router, settings, running.observing) as addresses,
        ):
            ready.set_result((addresses, asyncio.get_running_loop(), stop))
            await stop.wait()
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)
