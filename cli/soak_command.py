"""``outrider bench soak``: a service under load and faults, for an hour."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.bench_options import check_new_folder, make_folder
from cli.options import settings_of
from cluster.process.terminal import stderr, stdout

if TYPE_CHECKING:
    from benchmarks.soak.run import SoakRun
    from cluster.models.target import ResolvedModel

TINY = "tiny"
EPILOG = "\n\n".join(
    (
        "An hour: outrider bench soak. Ten minutes: outrider bench soak --minutes 10. Without faults: --fault-every 0.",
        "What is measured stands in the report, under 'What the words mean'.",
    )
)


def soak(
    minutes: Annotated[float, typer.Option(min=0.05, max=10_000, help="How long users ask.")] = 60.0,
    users: Annotated[int, typer.Option(min=1, max=1024, help="Users at once.")] = 12,
    fault_every: Annotated[float, typer.Option(min=0, max=3600, help="Mean seconds between two faults; 0: none.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed asks and breaks the same things.")] = 0,
    redis: Annotated[bool, typer.Option(help="With a retrieval index, in a Redis of its own that goes away, too.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="New folder for results.json, report.html, report.md, plots and logs.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Hugging Face name, folder or .gguf file; or tiny: a small random model, made on the spot, whose "
            "answers come often."
        ),
    ] = TINY,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting, section.key=value. Repeatable.")] = None,
) -> None:
    """Soak a service: users of several tenants ask at every door under every strategy, leave, and come back, while its
    processes are killed and stopped, and its networks cut, stalled and slowed.

    Two routers, two verifiers, two drafters and a retrieval service run in processes of their own, without Ray. Every answer
    is compared with plain decoding's, token by token. Exit code 1: an answer was neither right nor one explicit error,
    something is still held when everybody is gone, or memory or open files of a process grow.
    """
    from benchmarks.bench.plots import check_installed
    from benchmarks.soak.run import SoakConfig, SoakRun
    from cluster.process.signals import stop_on_signals

    check_installed()
    folder = out or Path(f"outrider-soak-{datetime.now():%Y%m%d-%H%M%S}")
    check_new_folder(folder)
    wanted = SoakConfig(minutes=minutes, users=users, every_s=fault_every, seed=seed, redis=redis, logs=folder / "logs")
    stop_on_signals()
    with tempfile.TemporaryDirectory() as made, _progress(wanted.seconds) as told:
        resolved, flags = _model(model, config, settings or [], Path(made))
        make_folder(folder / "logs")
        run = SoakRun(wanted, resolved, flags, config, told)
        try:
            asyncio.run(run.run())
        except KeyboardInterrupt:
            run.record.partial = True
    _show(run, folder)


def _model(name: str, config: Path | None, settings: list[str], made: Path) -> tuple[ResolvedModel, list[str]]:
    """The model, and all settings of the service."""
    from benchmarks.soak.tiny_model import SETTINGS, make_tiny_model
    from cluster.models.target import ResolvedModel, resolve

    if name == TINY:
        return ResolvedModel(name=TINY, path=make_tiny_model(made)), [*SETTINGS, *settings]
    loaded = settings_of(config, settings, model=name)
    return resolve(loaded.model, loaded.cache_dir, say=stderr().print), settings


def _show(run: SoakRun, folder: Path) -> None:
    from rich.markup import escape

    from benchmarks.bench.tables import render
    from benchmarks.soak.report import all_tables, write_report

    console, verdict = stdout(), run.record.verdict()
    write_report(run.record, verdict, folder)
    for table in all_tables(run.record, verdict):
        console.print(render(table))
    console.print(f"Report: {folder / 'report.html'}   everything: {folder}", highlight=False, soft_wrap=True)
    style = "green" if verdict.good else "bold red"
    console.print(f"[{style}]{escape(verdict.line)}[/{style}]", highlight=False, soft_wrap=True)
    if run.record.partial:
        raise typer.Exit(130)
    if not verdict.good:
        raise typer.Exit(1)


@contextmanager
def _progress(seconds: float) -> Iterator[Callable[[str, float], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=stderr(), transient=True) as bars:
        task = bars.add_task("Making the model", total=seconds)
        yield lambda words, at_s: bars.update(task, description=words, completed=at_s)
