"""``outrider draft``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def draft(
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The target: its tokenizer is all that most drafters need of it.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as drafter.port=50061. Repeatable.")
    ] = None,
) -> None:
    """Run a drafter outside of Ray, for a service whose drafter.address leads here, until interrupted."""
    from cluster.models.target import resolve
    from cluster.outside_drafter import drafting
    from cluster.process.logs import start_logging
    from cluster.process.signals import stop_on_signals
    from cluster.process.terminal import stderr
    from cluster.settings.config import load

    loaded = load(config, [*(settings or ()), *([f"model={model}"] if model is not None else ())])
    start_logging(loaded.logging)
    target = resolve(loaded.model, loaded.cache_dir, say=stderr().print)

    async def run() -> None:
        async with drafting(loaded, target) as address:
            print(f"Outrider drafts for {loaded.model} at {address} (Ctrl-C stops it)", flush=True)
            await asyncio.Event().wait()

    stop_on_signals()
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        stderr().print("Stopped")
