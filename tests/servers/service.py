"""The whole service on a tiny model or on the toy target, in this event loop, behind a real public server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.soak import tiny_model
from cluster.build import Pipeline, in_process
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from services.api.config import PublicServerConfig
from services.api.grpc.server import serve_public

# To run the suites under other kernels than those of this processor: a value of verifier.kernels.
KERNELS = os.environ.get("KERNELS_UNDER_TEST", "auto")


def tiny_settings(*flags: str) -> list[str]:
    """Settings that fit a tiny model."""
    return [f"verifier.kernels={KERNELS}", *tiny_model.SETTINGS, *flags]


@asynccontextmanager
async def pipeline(folder: Path, *flags: str) -> AsyncIterator[Pipeline]:
    """All components in this process."""
    settings = load(flags=tiny_settings(*flags), environ={})
    async with in_process(settings, ResolvedModel(name="tiny", path=folder)) as running:
        yield running


@asynccontextmanager
async def served(folder: Path, *flags: str, config: PublicServerConfig | None = None) -> AsyncIterator[tuple[str, Pipeline]]:
    """The public server in front of it, on a free loopback port."""
    async with pipeline(folder, *flags) as running:
        server = await serve_public(running.router, config or PublicServerConfig(port=0))
        try:
            yield server.address, running
        finally:
            await server.stop(0)
