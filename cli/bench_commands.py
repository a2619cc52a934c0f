"""``outrider bench``, ``outrider bench compare`` and ``outrider replay``."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchmarks.bench.measures import FORMULAS
from cli import host_command, never_slower_command, sizes_command, soak_command, stopping_command
from cli.bench_options import check_new_folder, check_own_ray, make_folder, read_names, read_numbers
from cli.fleet_commands import autoscale, fleet
from cli.options import EffortName, settings_of
from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError, InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.bench.lineup import LineupConfig
    from benchmarks.bench.measure import Schedule
    from benchmarks.bench.run import Bench
    from benchmarks.bench.tables import Table
    from benchmarks.replay.replay import Replayed, Trace
    from cluster.models.target import ResolvedModel
    from cluster.settings.config import Settings

Json = Annotated[bool, typer.Option("--json", help="Print JSON: a list of tables, each with its rows.")]
_FORMULAS = "\n\n".join(("What is measured:", *(f"{name}: {formula}." for name, formula in FORMULAS.items())))

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
for command in (autoscale, fleet):
    app.command()(command)
app.command(epilog=never_slower_command.EPILOG)(never_slower_command.never_slower)
app.command(epilog=host_command.EPILOG)(host_command.host)
app.command(epilog=sizes_command.EPILOG)(sizes_command.sizes)
app.command(epilog=soak_command.EPILOG)(soak_command.soak)
app.command()(stopping_command.stopping)


@app.callback(epilog=_FORMULAS)
def bench(
    context: typer.Context,
    prompts: Annotated[
        str,
        typer.Option(
            help="builtin, or a file of Spec-Bench, HumanEval, MBPP, GSM8K, ShareGPT, CNN/DM, DialogSum or E2E (.jsonl, "
            ".json or .csv), of messages, or of text with one prompt per line."
        ),
    ] = "builtin",
    strategies: Annotated[
        str | None, typer.Option(help="Comma-separated. Default: all. autoregressive always takes part.")
    ] = None,
    effort: EffortName = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Comma-separated: hf, hf_prompt_lookup, hf_assisted, vllm, vllm_ngram, vllm_suffix, llamacpp, "
            "llamacpp_q8_0, llamacpp_f32; or none."
        ),
    ] = "hf",
    on: Annotated[
        Literal["process", "ray"],
        typer.Option(help="process: Outrider's components in one process; ray: on a local Ray, linked by gRPC."),
    ] = "process",
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy, and compared with transformers' generate.")] = 0.0,
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time. Several values, comma-separated, are measured one after the other.")
    ] = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements; the contestants take turns.")] = 3,
    per_task: Annotated[int | None, typer.Option(min=1, help="Most prompts of each task. Default: all.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Request number n has the seed SEED + n.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for results.json, report.html, plots, logs, and traces, which the page at / opens."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds per request before a contestant counts as hung.")] = 120.0,
    assistant: Annotated[Path | None, typer.Option(help="Folder of the draft model for hf_assisted.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="GGUF file for the llamacpp peers. Default: the model's own.")] = None,
    peer_python: Annotated[
        list[str] | None, typer.Option(help="Where a peer is installed, such as vllm=/opt/vllm/bin/python. Repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face name, folder or .gguf file.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting, section.key=value. Repeatable.")] = None,
) -> None:
    """Measure the speed of every strategy against plain decoding and other engines, and check that no token changed.

    All contestants answer the same token ids with the same weights and threads, by turns. A ratio whose repeats disagree is
    printed as unclear. Exit code 1: a strategy failed or, where equal tokens are promised, changed one.
    """
    if context.invoked_subcommand is not None:
        return
    from benchmarks.bench.lineup import LineupConfig
    from benchmarks.bench.measure import Schedule
    from speculation.types import SamplingParams

    try:
        SamplingParams(temperature=temperature, max_tokens=max_tokens)
    except InvalidArgument as error:
        raise ConfigurationError(field=f"--{error.field}", value=error.value, allowed=error.allowed) from error
    schedule = Schedule(
        concurrency=read_numbers("--concurrency", concurrency),
        repeats=repeats,
        max_tokens=max_tokens,
        temperature=temperature,
    )
    loaded = settings_of(config, settings, model=model, **{"router.effort": effort})
    lineup = LineupConfig(
        strategies=_served(loaded) if strategies is None else read_names(strategies),
        peers=() if peers == "none" else read_names(peers),
        on_ray=on == "ray",
        timeout_s=timeout,
        assistant=assistant,
        gguf=gguf,
        peer_pythons=dict(_peer_python(entry) for entry in peer_python or ()),
    )
    folder = out or Path(f"outrider-bench-{datetime.now():%Y%m%d-%H%M%S}")
    _run(prompts, per_task, seed, schedule, lineup, folder, loaded)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Folder or results.json of a run.")],
    b: Annotated[Path, typer.Argument(help="Folder or results.json of another.")],
    as_json: Json = False,
) -> None:
    """Compare two runs: which changes are larger than the spread of their repeats?"""
    from benchmarks.bench.compare import compare as compare_results
    from benchmarks.bench.results import read_results

    _print(compare_results(read_results(a), read_results(b)), as_json)


def replay(
    traces: Annotated[Path, typer.Argument(help="jsonl with prompt_ids and output_ids in every line, or a bench folder.")],
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; what + joins drafts one tree, such as suffix+fspad+draft_model. Default: all that draft."
        ),
    ] = None,
    budgets: Annotated[str, typer.Option(help="Most nodes per pass; several values, comma-separated.")] = "3,7,15,31,63",
    model: Annotated[
        str | None,
        typer.Option(
            help="The model that wrote the answers: it is run, so that windows of lookahead and spectra are computed, and "
            "models that draft take part. Takes as long as answering."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting, section.key=value. Repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Try drafters on recorded answers, without a model: tokens per pass for every strategy and budget, in seconds.

    Strategies that look up need --set retrieval.index=FOLDER. Without --model nothing computes the windows of lookahead and
    spectra, which give fewer tokens per pass then, and no model drafts; with it those draft that come along for it, or that
    --set 'drafter.models=[FOLDER, ...]' names.
    """
    from rich.progress import track

    from benchmarks.bench.contestants import check_names
    from benchmarks.replay.replay import read_traces, table
    from speculation.sources import STRATEGIES

    names = read_names(strategies) if strategies is not None else None
    for name in names or ():
        check_names(name.split("+"), ())
    sizes = read_numbers("--budgets", budgets, most=512 if model is None else 128)
    recorded = read_traces(traces)
    with _replaying(config, settings, model) as (sources, replay_with):
        usable = tuple(name for name in sources if STRATEGIES[name])
        if missing := sorted({part for name in names or () for part in name.split("+")} - set(usable)):
            raise ConfigurationError(
                f"--strategies: {missing[0]} cannot be replayed; {', '.join(usable)} can", about="--strategies"
            )
        grid = [(name, budget) for name in names or usable for budget in sizes]
        results = {}
        for name, budget in track(grid, "Replaying", console=stderr(), transient=True):
            joined = dict.fromkeys(source for part in name.split("+") for source in sources[part])
            results[name, budget] = replay_with(recorded, tuple(joined), budget)
    _print([table(results)], as_json)


@contextmanager
def _replaying(
    config: Path | None, settings: list[str] | None, model: str | None
) -> Iterator[tuple[dict[str, tuple[str, ...]], Callable[[Sequence[Trace], Sequence[str], int], Replayed]]]:
    """The sources of each strategy that can be replayed, and what replays them; with a model, it is loaded meanwhile."""
    from benchmarks.papers.engine import SETTINGS, PaperEngine
    from benchmarks.replay.on_target import replay_on_target
    from benchmarks.replay.replay import replay as replay_traces
    from cluster.models.target import ResolvedModel, resolve
    from cluster.settings.component_configs import drafter_config, router_config
    from services.router.strategies import StrategyConfig, served, sources_of

    loaded = settings_of(config, [*(settings or []), *(SETTINGS if model else ())], model=model)
    index = loaded.retrieval.index
    if loaded.retrieval.redis_url is not None:
        raise ConfigurationError("replay looks up in a folder; set retrieval.index", field="retrieval.redis_url")
    if model is None:
        # There is no target, so neither models nor hidden states.
        here = StrategyConfig(retrieval=index is not None)
        drafter = drafter_config(loaded, ResolvedModel(name=loaded.model, path=Path(loaded.model)))
        sources = {name: sources_of(name, here) for name in served(here)}
        yield sources, lambda traces, sources, nodes: replay_traces(traces, sources, nodes, drafter, index)
        return
    resolved = resolve(loaded.model, loaded.cache_dir, say=stderr().print)
    here = router_config(loaded, resolved).strategy
    engine = PaperEngine(loaded, resolved)
    try:
        sources = {name: sources_of(name, here) for name in served(here)}
        yield sources, lambda traces, sources, nodes: replay_on_target(engine, traces, sources, nodes, index)
    finally:
        engine.close()


def _print(tables: Sequence[Table], as_json: bool) -> None:
    """Print tables; as JSON, a list of them, the rows by their columns' names."""
    from benchmarks.bench.tables import as_object, render

    if as_json:
        typer.echo(json.dumps([as_object(table) for table in tables], ensure_ascii=False))
        return
    for table in tables:
        stdout().print(render(table))


def _run(
    source: str,
    per_task: int | None,
    seed: int,
    schedule: Schedule,
    lineup_config: LineupConfig,
    folder: Path,
    settings: Settings,
) -> None:
    from benchmarks.bench.contestants import check_names
    from benchmarks.bench.lineup import Lineup
    from benchmarks.bench.plots import check_installed
    from benchmarks.bench.prompts import read_prompts
    from benchmarks.bench.run import Bench, BenchConfig
    from cluster.process.signals import stop_on_signals

    # Find mistakes before anything is loaded.
    check_installed()
    check_names(lineup_config.strategies, lineup_config.peers)
    prompts = tuple(read_prompts(source, per_task))
    if lineup_config.on_ray:
        check_own_ray(settings)
    check_new_folder(folder)
    console = stdout()
    resolved, lineup_config = _models(settings, lineup_config, console)
    settings = _with_room(settings, max(schedule.concurrency))
    make_folder(folder)
    lineup = Lineup(lineup_config, settings, resolved, folder / "logs")
    config = BenchConfig(source=source, prompts=prompts, schedule=schedule, seed=seed)
    bench = Bench(config, lineup, settings, resolved, console)
    partial = False
    stop_on_signals()
    # A closed terminal must not leave contestants behind, so it ends the run as Ctrl-C does.
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        bench.run()
    except KeyboardInterrupt:
        partial = True
        console.print("[yellow]Interrupted: what was measured so far is kept, marked as partial[/yellow]")
    finally:
        lineup.close()
    _write(bench, folder, console, partial=partial)
    if partial:
        raise typer.Exit(130)
    if bench.failed or (bench.exact and not bench.lossless):
        raise typer.Exit(1)


def _write(bench: Bench, folder: Path, console: Console, *, partial: bool) -> None:
    from rich.markup import escape

    from benchmarks.bench.report import write_report
    from benchmarks.bench.results import RESULTS, TRACES, write_results, write_traces
    from benchmarks.bench.tables import all_tables, render

    results = bench.results(partial=partial)
    write_results(folder / RESULTS, results)
    write_traces(folder / TRACES, bench.requests, bench.answers, bench.runs)
    for name in bench.failed if not partial else ():
        why = escape(results["contestants"][name]["note"] or "it was not measured")
        console.print(f"[bold red]{name} failed:[/bold red] {why}", soft_wrap=True, highlight=False)
    if not results["cells"]:
        console.print("Nothing was measured.")
        return
    for table in all_tables(results):
        console.print(render(table))
    write_report(results, folder)
    console.print(f"Report: {folder / 'report.html'}   everything: {folder}", highlight=False, soft_wrap=True)
    if not bench.lossless and bench.exact:
        console.print("[bold red]NOT LOSSLESS: a strategy changed tokens; see 'Answers that differ'[/bold red]")
    elif not bench.lossless:
        console.print("Some answers differ, as is allowed: equal tokens are promised only in float32 with acceptance: walk")


def _models(settings: Settings, lineup: LineupConfig, console: Console) -> tuple[ResolvedModel, LineupConfig]:
    """The model's folder, and the configuration with the GGUF file that peers need."""
    from dataclasses import replace

    from benchmarks.bench.contestants import PEERS
    from cluster.models.target import gguf_of, resolve

    if lineup.assistant is not None and not (lineup.assistant / "config.json").is_file():
        raise ConfigurationError(field="--assistant", value=lineup.assistant, allowed="the folder of a model")
    if lineup.gguf is not None and not lineup.gguf.is_file():
        raise ConfigurationError("no such file", field="--gguf", value=lineup.gguf)
    model = resolve(settings.model, settings.cache_dir, say=console.print)
    if lineup.gguf is None and any(PEERS[name].needs == "gguf" for name in lineup.peers):
        lineup = replace(lineup, gguf=gguf_of(settings.model, settings.cache_dir, say=console.print))
    return model, lineup


def _with_room(settings: Settings, at_once: int) -> Settings:
    """Settings that allow this many requests in one batch."""
    verifier = settings.verifier.model_copy(update={"max_num_seqs": max(at_once, settings.verifier.max_num_seqs)})
    return settings.model_copy(update={"verifier": verifier})


def _served(settings: Settings) -> tuple[str, ...]:
    from cluster.checks.preflight import model_folder
    from cluster.models.target import ResolvedModel
    from cluster.settings.component_configs import router_config
    from services.router.strategies import served

    model = ResolvedModel(name=settings.model, path=model_folder(settings) or Path(settings.model))
    return served(router_config(settings, model).strategy)


def _peer_python(entry: str) -> tuple[str, Path]:
    name, _, python = entry.partition("=")
    if name not in ("vllm", "llamacpp") or not python or not Path(python).is_file():
        raise ConfigurationError(
            field="--peer-python", value=entry, allowed="vllm=PATH or llamacpp=PATH of a Python interpreter"
        )
    return name, Path(python)
