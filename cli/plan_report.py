"""Prints the plan and the models as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cluster import build
from cluster.config import Placed, Settings
from cluster.model_files import cache_bytes
from cluster.models import BUILT_IN
from cluster.preflight import generation_config, model_folder, preflight
from cluster.ray_address import check_ray_answers, ray_is_here
from retrieval_index.urls import without_password
from services.machine import processor
from services.verifier.kept import digest_of, latest

if TYPE_CHECKING:
    import outrider


def print_plan(settings: Settings) -> None:
    """Print what ``outrider serve`` would run.

    Raises:
        ConfigurationError: ``outrider serve`` would refuse the settings.
    """
    unchecked = preflight(settings, here=ray_is_here())
    check_ray_answers()
    server = build.server_config(settings)
    table = Table(title=f"outrider serve: {settings.model}", title_justify="left")
    for column in ("component", "replicas", "CPUs", "GPUs", "listens on", "does"):
        table.add_column(column, no_wrap=column == "listens on")
    router, drafter, verifier = settings.router, settings.drafter, settings.verifier
    guard = "API keys" if server.api_key_hashes else "no API keys"
    guard += " and TLS" if server.tls else ", no TLS"
    pool = _pool_size(settings)
    rows: tuple[tuple[Placed, str, str, str], ...] = (
        (router, "router", f"{server.host}:{server.port}", f"public gRPC ({guard}); {router.strategy} by default"),
        (drafter, "drafter", f"{drafter.host}, any port", "proposes token trees over gRPC"),
        (verifier, "verifier", "Ray Serve handle", f"target in {verifier.dtype} on {verifier.device}"),
    )
    if settings.retrieval.enabled:
        source = settings.retrieval.index or without_password(settings.retrieval.redis_url or "")
        rows += ((settings.retrieval, "retrieval", f"{settings.retrieval.host}, any port", f"looks up in {source}"),)
    for component, name, where, what in rows:
        table.add_row(name, str(component.replicas), f"{component.num_cpus:g}", f"{component.num_gpus:g}", where, what)
    console = Console()
    console.print(table)
    console.print(
        f"verifier: up to {verifier.max_num_seqs} requests at once, {verifier.max_waiting} waiting; "
        f"key-value pool of {verifier.kv_cache_tokens:,} tokens{pool}; "
        f"waits at most {1e3 * verifier.draft_deadline_s:g} ms per step for drafts"
    )
    if verifier.stages > 1:
        console.print(
            f"verifier: its layers in {verifier.stages} processes, each with these CPUs and GPUs, "
            f"which find each other at {verifier.stage_host}, any port"
        )
    if verifier.device == "cpu":
        console.print(f"kernels: {_kernels(settings)}")
    if (found := generation_config(settings)) is not None:
        defaults = {name: value for name, value in asdict(found.defaults).items() if value not in (None, ())}
        _print_generation(console, settings.model, defaults, dict(found.processors.shown))
        for note in found.notes:
            console.print(f"note: {note}", markup=False)
    console.print(f"models are kept in {settings.cache_dir}")
    for what in unchecked:
        console.print(f"not checked: {what}")


def _pool_size(settings: Settings) -> str:
    """Memory of the key-value pool; empty if the model's configuration is not on this machine."""
    folder = model_folder(settings)
    size = None if folder is None else cache_bytes(settings.verifier, build.read_model_config(folder))
    return "" if size is None else f" ({size / 2**20:,.0f} MiB)"


def _kernels(settings: Settings) -> str:
    """The kernels that an earlier start chose on this processor."""
    wanted = f"verifier.kernels: {settings.verifier.kernels}, verifier.weights: {settings.verifier.weights}"
    folder = settings.cache_dir / build.KERNELS
    model = model_folder(settings)
    known = None if model is None else latest(folder, model=digest_of(str(model)), processor=processor())
    if known is None:
        return f"{wanted}; the first start times what there is and takes the fastest exact one"
    what = f"{known['linears']} {known['instructions']}, weights {known['weights']}"
    return f"{what} ({wanted}); {known['reason']}"


def print_models(address: str, served: Sequence[outrider.Model], settings: Settings, *, verbose: bool = False) -> None:
    """Print the models of a server and those on this machine; ``verbose`` adds what their generation configs do."""
    console = Console()
    if served:
        table = Table(title=f"Served at {address}", title_justify="left")
        for column in ("model", "context", "vocabulary", "same tokens", "strategies (default first)"):
            table.add_column(column)
        for model in served:
            others = [name for name in model.strategies if name != model.default_strategy]
            strategies = ", ".join([model.default_strategy, *others])
            same = "bit for bit" if model.bit_exact else "up to near ties"
            table.add_row(model.name, f"{model.max_model_len:,}", f"{model.vocab_size:,}", same, strategies)
        console.print(table)
        for model in served if verbose else ():
            _print_generation(console, model.name, model.defaults, model.processors)
    else:
        console.print(f"No server answers at {address}; start one with: outrider serve")
    folders = sorted((settings.cache_dir / "models").glob("*/config.json"))
    names = [file.parent.name for file in folders]
    console.print(f"On this machine ({settings.cache_dir}): {', '.join(names) or 'none yet'}")
    if BUILT_IN not in names:
        console.print(f"{BUILT_IN} is fetched from PyPI when it is first used.")


def _print_generation(console: Console, name: str, defaults: Mapping[str, Any], processors: Mapping[str, str]) -> None:
    """Print what a model's generation config does."""
    said = ", ".join(f"{field} {json.dumps(value)}" for field, value in defaults.items())
    console.print(f"{name}: requests that leave it open get {said or 'what holds for all models'}", markup=False)
    for field, value in processors.items():
        console.print(f"{name}: logits pass through {field} {value}", markup=False)
