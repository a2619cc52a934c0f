"""``outrider draft`` and ``outrider verify``: components outside of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import ConfigFile, settings_of

if TYPE_CHECKING:
    from cluster.models.target import ResolvedModel
    from cluster.settings.config import Settings


def draft(
    config: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The target: its tokenizer is all that most drafters need of it.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as drafter.port=50061. Repeatable.")
    ] = None,
) -> None:
    """Run a drafter outside of Ray, for a service whose drafter.address leads here, until interrupted."""
    from cluster.outside.drafter import drafting

    _run(drafting, "drafts", config, model, settings)


def verify(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option("--model", help="The target.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as verifier.port=50071. Repeatable.")
    ] = None,
) -> None:
    """Run a verifier outside of Ray, for a service whose router.verifiers lead here, until interrupted."""
    from cluster.outside.verifier import verifying

    lost = asyncio.Event()
    _run(partial(verifying, lost=lost), "verifies", config, model, settings, lost)


def _run(
    serving: Callable[[Settings, ResolvedModel], AbstractAsyncContextManager[str]],
    does: str,
    config: Path | None,
    model: str | None,
    settings: list[str] | None,
    lost: asyncio.Event | None = None,
) -> None:
    """Serve until interrupted, or until ``lost`` is set, which ends with code 1; ``serving`` gives where."""
    from cluster.models.target import resolve
    from cluster.process.logs import start_logging
    from cluster.process.signals import stop_on_signals
    from cluster.process.terminal import stderr

    loaded = settings_of(config, settings, model=model)
    start_logging(loaded.logging)
    target = resolve(loaded.model, loaded.cache_dir, say=stderr().print)

    async def run() -> None:
        async with serving(loaded, target) as address:
            print(f"Outrider {does} for {loaded.model} at {address} (Ctrl-C stops it)", flush=True)
            await (lost or asyncio.Event()).wait()
            raise typer.Exit(1)

    stop_on_signals()
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        stderr().print("Stopped")
