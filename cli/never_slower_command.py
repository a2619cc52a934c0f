"""``outrider bench never-slower``: is any load slower with drafting than without it?"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.never_slower.verdict import FORMULAS
from cli.bench_options import check_new_folder, check_own_ray, make_folder, read_names, read_numbers
from cli.options import settings_of
from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from benchmarks.never_slower.run import NeverSlowerConfig, NeverSlowerRun
    from cluster.settings.config import Settings

EPILOG = "\n\n".join(
    (
        "Before a change of engine, budget or drafters: outrider bench never-slower --quick, with nothing else running.",
        "A part of the grid: --at-once 8 --kinds open,json --temperatures 0 --lengths short --on process.",
        "What is measured:",
        *(f"{name}: {formula}." for name, formula in FORMULAS.items()),
    )
)
_QUICK = {"at_once": "1,8,24", "kinds": "open,mixed", "temperatures": "0", "lengths": "short", "on": "process"}
_FULL = {
    "at_once": "1,2,4,8,16,24,32,64",
    "kinds": "open,edits,code,summaries,translation,json,mixed,changing",
    "temperatures": "0,1",
    "lengths": "short,4k",
    "on": "process,ray",
}
_QUICK_SECONDS, _FULL_SECONDS = 6.0, 10.0


def never_slower(
    quick: Annotated[
        bool, typer.Option("--quick", help="Ten minutes: 1, 8 and 24 at once, open and mixed, temperature 0, in process.")
    ] = False,
    prompts: Annotated[
        str,
        typer.Option(
            help="builtin, or a file as for outrider bench. Its prompts come first, each once a turn; then, and for kinds "
            "that it lacks, built-in ones."
        ),
    ] = "builtin",
    strategies: Annotated[str, typer.Option(help="Comma-separated: what is compared with plain decoding.")] = "auto,blend",
    at_once: Annotated[str | None, typer.Option(help=f"Requests in flight. Default: {_FULL['at_once']}.")] = None,
    kinds: Annotated[str | None, typer.Option(help=f"Default: {_FULL['kinds']}. changing: another kind every 30 s.")] = None,
    temperatures: Annotated[str | None, typer.Option(help=f"Default: {_FULL['temperatures']}.")] = None,
    lengths: Annotated[str | None, typer.Option(help="short, or 4k: behind 4096 tokens of notes. Default: both.")] = None,
    on: Annotated[str | None, typer.Option(help="process, or ray: on a local Ray, linked by gRPC. Default: both.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of every cell, each with other prompts.")] = 3,
    seconds: Annotated[float | None, typer.Option(min=0.5, help="Length of a turn. Default: 10; --quick: 6.")] = None,
    change_every: Annotated[float, typer.Option(min=0.5, help="Seconds that changing prompts stay of one kind.")] = 30.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Answers have at most half of this to all of it.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="The same seed asks the same prompts.")] = 1,
    out: Annotated[Path | None, typer.Option(help="New folder for results.json, report.html, report.md and plots.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what --out holds; same options, same commit.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Hugging Face name, folder or .gguf file.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting, section.key=value. Repeatable.")] = None,
) -> None:
    """Find a load that drafting makes slower than plain decoding.

    Every cell of {at once} x {kind of prompt} x {temperature} x {length} x {in process, on Ray} is measured by turns: plain
    decoding, each strategy, and plain decoding again, since two equal runs differ, and that is the noise. In process each
    of them has a service of its own, and they take turns of a second; on Ray they share one, which forgets all requests
    before the next one's turn. All keep the same requests in flight. Every answer is compared with plain decoding's, token
    by token. The whole grid takes about two days; what is measured is kept after each round, Ctrl-C ends
    the run, and --resume goes on with it.

    Exit code 1: a cell is slower than 0.98 of plain decoding beyond its noise, has a second below 0.95 as plain decoding has
    none, has a wrong token, or failed. Nothing else should run on the machine meanwhile.
    """
    from benchmarks.bench.prompts import BUILTIN, read_prompts
    from benchmarks.never_slower.cells import grid
    from benchmarks.never_slower.run import NeverSlowerConfig
    from benchmarks.never_slower.turns import RoundPlan

    if resume and out is None:
        raise ConfigurationError("--resume goes on with a folder: name it with --out", about="--resume")
    default = _QUICK if quick else _FULL
    cells = grid(
        read_numbers("--at-once", at_once or default["at_once"]),
        read_names(kinds or default["kinds"]),
        _temperatures(temperatures or default["temperatures"]),
        read_names(lengths or default["lengths"]),
        read_names(on or default["on"]),
    )
    plan = RoundPlan(
        strategies=_compared(strategies),
        seconds=seconds or (_QUICK_SECONDS if quick else _FULL_SECONDS),
        change_every_s=change_every,
    )
    wanted = NeverSlowerConfig(
        source=prompts,
        prompts=() if prompts == BUILTIN else tuple(read_prompts(prompts)),
        cells=cells,
        plan=plan,
        repeats=repeats,
        max_tokens=max_tokens,
        seed=seed,
    )
    loaded = settings_of(config, settings, model=model)
    _measure(wanted, loaded, out or Path(f"outrider-never-slower-{datetime.now():%Y%m%d-%H%M%S}"), resume=resume)


def _measure(wanted: NeverSlowerConfig, settings: Settings, folder: Path, *, resume: bool) -> None:
    from benchmarks.bench.plots import check_installed
    from benchmarks.never_slower.run import NeverSlowerRun
    from cluster.models.target import resolve
    from cluster.process.signals import stop_on_signals

    check_installed()
    if any(cell.on == "ray" for cell in wanted.cells):
        check_own_ray(settings)
    if not resume:
        check_new_folder(folder)
    console = stderr()
    run = NeverSlowerRun(wanted, settings, resolve(settings.model, settings.cache_dir, say=console.print), folder, console)
    if resume:
        run.resume()
    else:
        make_folder(folder)
    console.print(
        f"{len(wanted.cells)} cells, {wanted.repeats} repeats: {_duration(wanted.estimate_s)} or more; to {folder}",
        highlight=False,
        soft_wrap=True,
    )
    partial = False
    stop_on_signals()
    try:
        run.run()
    except KeyboardInterrupt:
        partial = True
        console.print("[yellow]Interrupted: whole rounds are kept, and --resume goes on with them[/yellow]")
    broken = _show(run, folder, partial=partial)
    if partial:
        raise typer.Exit(130)
    if broken:
        raise typer.Exit(1)


def _show(run: NeverSlowerRun, folder: Path, *, partial: bool) -> bool:
    """Print and write the verdict; returns whether it is no."""
    from rich.markup import escape

    from benchmarks.bench.tables import render
    from benchmarks.never_slower.record_file import write_record
    from benchmarks.never_slower.report import all_tables, verdict_line, write_report
    from benchmarks.never_slower.verdict import judge

    console = stdout()
    record, verdict = run.record(partial=partial), judge(run.turns, exact=run.exact)
    line = verdict_line(verdict)
    write_record(folder, {**record, "verdict": {"word": verdict.word, "said": line}})
    for table in all_tables(record, verdict):
        console.print(render(table))
    if verdict.cells:
        write_report(record, verdict, folder)
        console.print(f"Report: {folder / 'report.html'}   everything: {folder}", highlight=False, soft_wrap=True)
    style = {"yes": "green", "no": "bold red"}.get(verdict.word, "yellow")
    console.print(f"[{style}]{escape(line)}[/{style}]", highlight=False, soft_wrap=True)
    return verdict.word == "no"


def _compared(text: str) -> tuple[str, ...]:
    from benchmarks.bench.contestants import check_names
    from benchmarks.never_slower.cells import PLAIN

    names = tuple(name for name in read_names(text) if name != PLAIN)
    check_names(names, ())
    if not names:
        raise ConfigurationError(
            f"--strategies is {text}: name one besides {PLAIN}, which always takes part", about="--strategies"
        )
    return names


def _temperatures(text: str) -> tuple[float, ...]:
    from speculation.errors import InvalidArgument
    from speculation.types import SamplingParams

    try:
        values = tuple(float(part) for part in text.split(","))
        for value in values:
            SamplingParams(temperature=value, max_tokens=1)
    except (ValueError, InvalidArgument) as error:
        raise ConfigurationError(f"{error}", field="--temperatures", value=text) from error
    return values


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
