"""Prints the plan and the models as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.models_report import print_generation
from cluster.checks.host import idle_gpus
from cluster.checks.listeners import listeners
from cluster.checks.model_files import cache_bytes, expanded
from cluster.checks.pods import Examined
from cluster.checks.preflight import generation_config, model_folder, preflight
from cluster.models.drafters import draft_models, trained_config, with_checkpoints
from cluster.models.target import ResolvedModel
from cluster.ray import resources
from cluster.ray.address import check_ray_answers, ray_is_here
from cluster.settings import component_configs
from cluster.settings.config import Settings
from cluster.settings.placement import Placed
from retrieval_index.access import without_password
from services.drafter.heads.files.kinds import Checkpoint
from services.drafter.heads.files.target_shape import read_target_shape
from services.machine.processor import processor
from services.verifier.checks.kept_measurements import digest_of, latest


def examined_here(settings: Settings) -> Examined:
    """Check the settings for this machine, or for the Ray that the environment names.

    Raises:
        ConfigurationError: ``outrider serve`` would refuse them.
    """
    unchecked = preflight(settings, here=ray_is_here())
    check_ray_answers()
    return Examined(settings=settings, folder=model_folder(settings), unchecked=unchecked)


def plan_object(examined: Examined) -> dict[str, Any]:
    """What would run, for other programs: components, with cores and GPUs of each process, and what listens where."""
    settings = examined.settings
    parts = [
        {
            "name": name,
            "replicas": [part.fewest, part.most],
            "processes": part.processes,
            "num_cpus": part.num_cpus,
            "num_gpus": part.num_gpus,
        }
        for name, part in resources.components(settings).items()
    ]
    size = None
    tokens = settings.verifier.known_cache_tokens
    if examined.folder is not None and tokens is not None:
        size = cache_bytes(settings.verifier, component_configs.read_model_config(examined.folder), tokens)
    return {
        "model": settings.model,
        "components": parts,
        "listeners": [asdict(each) for each in listeners(settings)],
        "kv_cache_bytes": size,
        "unchecked": list(examined.unchecked),
    }


def _split(settings: Settings) -> str:
    """How a verifier's layers are spread over processes."""
    verifier, together = settings.verifier, settings.cluster.placement.stages == "STRICT_PACK"
    ranks = verifier.tensor_parallel_size
    split = f", as {ranks} ranks in each of {verifier.stages} stages" if ranks > 1 else ""
    return (
        f"verifier: its layers in {verifier.processes} processes{split}, each with these CPUs and GPUs, "
        f"{'on one node' if together else 'on as few nodes as have room'}, "
        f"which find each other at {verifier.stage_host}, any port"
    )


def print_examined(examined: Examined, kept_in: Path | None = None) -> None:
    """Print what would run.

    Args:
        kept_in: the volume of the pods that it would run in; None: it would run on this machine.
    """
    settings, folder = examined.settings, examined.folder
    server, http = component_configs.server_config(settings), component_configs.http_config(settings)
    table = Table(title=f"outrider serve: {settings.model}", title_justify="left")
    for column in ("component", "replicas", "CPUs", "GPUs", "listens on", "does"):
        table.add_column(column, no_wrap=column == "listens on")
    router, drafter, verifier = settings.router, settings.drafter, settings.verifier
    guard = "API keys" if server.asks_for_keys else "no API keys"
    guard += " and TLS" if server.tls else ", no TLS"
    pool = _pool_size(settings, folder)
    rows: tuple[tuple[Placed, str, str, str], ...] = (
        (router, "router", f"{server.host}:{server.port}", f"public gRPC ({guard}); {router.strategy} by default"),
        (drafter, "drafter", f"{drafter.host}, any port", "proposes token trees over gRPC"),
        (verifier, "verifier", "Ray Serve handle", f"target in {verifier.dtype} on {verifier.device}"),
    )
    if settings.retrieval.enabled:
        source = settings.retrieval.index or without_password(settings.retrieval.redis_url or "")
        rows += ((settings.retrieval, "retrieval", f"{settings.retrieval.host}, any port", f"looks up in {source}"),)
    running = resources.components(settings)
    rows = tuple(row for row in rows if row[1] in running)
    for component, name, where, what in rows:
        table.add_row(name, _replicas(component), f"{component.num_cpus:g}", f"{component.num_gpus:g}", where, what)
    console = Console()
    console.print(table)
    for line in _placement(settings, [component for component, *_ in rows]):
        console.print(line, markup=False)
    if http is not None:
        console.print(f"router: OpenAI's API over HTTP at {http.host}:{http.port}, in the same process")
    if settings.router.verifiers:
        console.print(f"verifiers: {', '.join(settings.router.verifiers)}, run by `outrider verify`", markup=False)
        for what in examined.unchecked:
            console.print(f"not checked: {what}")
        return
    longest = "" if verifier.max_wait_s is None else f" for {verifier.max_wait_s:g} s at most"
    console.print(
        f"verifier: up to {verifier.max_num_seqs} requests at once, {verifier.max_waiting} waiting{longest}; "
        f"key-value pool of {pool}; "
        f"waits at most {1e3 * verifier.draft_deadline_s:g} ms per step for drafts"
    )
    if (ops := settings.server.ops) is not None:
        where = f"{settings.server.ops_host}:{ops}" if ops else f"{settings.server.ops_host}, any port"
        console.print(f"numbers and health for those who operate it: http://{where}/metrics, /health, /ready", markup=False)
    if verifier.processes > 1:
        console.print(_split(settings))
    if folder is not None and (weights := expanded(verifier, folder)):
        console.print(f"weights: {weights}", markup=False)
    for line in _draft_models(settings, folder):
        console.print(line, markup=False)
    if verifier.device == "cpu" and kept_in is None:
        console.print(f"kernels: {_kernels(settings, folder)}")
        if ray_is_here() and (idle := idle_gpus(verifier.device)):
            console.print(f"note: {idle}", markup=False)
    if folder is not None and (found := generation_config(settings, folder)) is not None:
        defaults = {name: value for name, value in asdict(found.defaults).items() if value not in (None, ())}
        print_generation(console, settings.model, defaults, dict(found.processors.shown))
        for note in found.notes:
            console.print(f"note: {note}", markup=False)
    console.print(f"models are kept in {kept_in or settings.cache_dir}")
    for what in examined.unchecked:
        console.print(f"not checked: {what}")


def _replicas(component: Placed) -> str:
    scales = component.autoscaling is not None
    return f"{component.fewest} to {component.most}" if scales else str(component.replicas)


def _placement(settings: Settings, components: Sequence[Placed]) -> Iterator[str]:
    """Lines on what all replicas together need, on what they share, and on how they end."""

    def together(count: Callable[[Placed], int]) -> str:
        numbers = [count(each) * each.processes for each in components]
        cpus = sum(number * each.num_cpus for number, each in zip(numbers, components, strict=True))
        gpus = sum(number * each.num_gpus for number, each in zip(numbers, components, strict=True))
        return f"{sum(numbers)} processes with {cpus:g} CPUs and {gpus:g} GPUs"

    most = "" if all(each.autoscaling is None for each in components) else f", at most {together(lambda each: each.most)}"
    yield f"on Ray: {together(lambda each: each.fewest)}{most}; Ray's own processes and ports come besides (SECURITY.md)"
    for name in resources.components(settings):
        if (wanted := resources.custom_resource(settings, name)) is not None:
            yield f"{name}: only on nodes with Ray's resource {wanted}"
    router, verifier, server = settings.router, settings.verifier, settings.server
    if router.most > 1:
        yield f"routers: those of one machine share port {server.port}; each connection belongs to one of them"
    if verifier.most > 1:
        yield "verifiers: prompts of one key that begin alike go to the same one, unless it has more than its share to do"
    yield (
        f"a router that stops refuses calls after {server.drain_delay_s:g} s, and ends after {server.drain_grace_s:g} s "
        f"more at most; a verifier after {verifier.drain_s:g} s, and what it has not finished goes on at another one"
    )
    yield "between components: " + ("mutual TLS and a token" if settings.cluster.tls else "a token, no TLS")


def _pool_size(settings: Settings, folder: Path | None) -> str:
    """What the key-value pool holds, and its memory if the model's configuration is on this machine."""
    verifier, tokens = settings.verifier, settings.verifier.known_cache_tokens
    if tokens is None:
        share = f"verifier.gpu_memory_utilization: {verifier.gpu_memory_utilization:g}"
        return f"the tokens for which each GPU has room ({share}; `outrider plan --gpus` says how many)"
    size = None if folder is None else cache_bytes(verifier, component_configs.read_model_config(folder), tokens)
    return f"{tokens:,} tokens" + ("" if size is None else f" ({size / 2**20:,.0f} MiB)")


def _draft_models(settings: Settings, folder: Path | None) -> Iterator[str]:
    """A line for every model that drafts: what it is, where it runs and what memory it takes."""
    trained = trained_config(settings)
    model = ResolvedModel(name=settings.model, path=folder or Path(settings.model))
    models = draft_models(settings, model)
    at_start = with_checkpoints(trained, settings, models).at_start
    for name, found in models.items():
        if found.in_target:
            size = found.bytes_in("float32") / 2**20
            held = f"{size:,.0f} MiB in float32, in the verifier's processes"
            yield f"{name}: {found.folder}, {held}: the target drafts by it in its own passes"
            continue
        size = found.bytes_in(trained.dtype) / 2**20
        where = "drafter's" if settings.drafter.models_in == "drafter" else "verifier's"
        reads = "" if folder is None else _states_read(found, folder)
        memory = f"{size:,.0f} MiB in {trained.dtype} on {trained.device}"
        loaded = "" if name in at_start else ", loaded when a request first names it"
        yield f"{name}: {found.folder}, {memory}, in the {where} processes{reads}{loaded}"


def _states_read(found: Checkpoint, target: Path) -> str:
    """Which of the target's hidden states a model that drafts reads, and what one token's take on their way."""
    if not found.layers:
        return ""
    # Numbers of two bytes, in float16 or bfloat16.
    size = 2 * read_target_shape(target).hidden_size * len(found.layers)
    layers = ", ".join(map(str, found.layers))
    return f", reads the target's states of layers {layers} ({size:,} bytes a token)"


def _kernels(settings: Settings, model: Path | None) -> str:
    """The kernels that an earlier start chose on this processor."""
    verifier = settings.verifier
    wanted = f"verifier.kernels: {verifier.kernels}, verifier.weights: {verifier.weights}"
    folder = settings.cache_dir / component_configs.KERNELS
    known = None if model is None else latest(folder, model=digest_of(str(model)), processor=processor())
    if known is None:
        return f"{wanted}; the first start times what there is and takes the fastest exact one"
    return f"{known['linears']} {known['instructions']}, weights {known['weights']} ({wanted}); {known['reason']}"
