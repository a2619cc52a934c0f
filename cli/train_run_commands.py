"""``outrider train run``, ``evaluate`` and ``export``."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.options import settings_of
from cluster.process.terminal import stderr, stdout
from speculation import limits
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from training.evaluate import DomainFigures
    from training.open_run import TrainingTarget
    from training.trainer import StepProgress

Data = Annotated[Path, typer.Option("--data", help="Folder made by outrider train data.")]
Model = Annotated[str | None, typer.Option(help="The target model. Default: the one that wrote the data.")]
Device = Annotated[str, typer.Option(help="Device of the drafter: cpu or cuda.")]
Run = Annotated[Path, typer.Argument(help="Folder of a run; or one of its checkpoints, instead of the best.")]


def run(
    recipe: Annotated[
        str,
        typer.Option(
            help="fspad, fspad_top_k, eagle, eagle3, block, medusa, streams, draft_model or another built-in one, or a file."
        ),
    ],
    data: Data,
    vocabulary: Annotated[Path, typer.Option(help="Folder of outrider train vocabulary, or a checkpoint that drafts it.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for checkpoints; continues an interrupted run.")],
    model: Model = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps. Default: the recipe's.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(min=0, help="Save and stop after so long; the next run goes on.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--start-from", help="Folder of a checkpoint of the same shape, whose weights the run begins with."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the folder's checkpoints and begin again.")] = False,
    device: Device = "cpu",
) -> None:
    """Train a drafter on the target's text.

    fspad and eagle draft one token after the other from the target's last state, eagle3 from states of three layers; block
    and medusa guess several tokens in one pass, streams in passes of the target's own last layers; draft_model is made of
    the target's first layers. eagle3 and block need data made with outrider train data --recipe eagle3 --recipe block.

    A run that was interrupted goes on with the same bits. SIGTERM and Ctrl-C save and leave.
    """
    from cluster.checks.host import check_device, check_folder
    from training.data_manifest import read_data_manifest, write_manifest
    from training.evaluate import quick_score
    from training.fitted_streams import fit_start
    from training.interruption import keep_freed_memory
    from training.open_run import fresh_state, open_model
    from training.recipe import load_recipe
    from training.shards import read_shards
    from training.snapshots import forget_run
    from training.trainer import RunLimits, Trainer
    from training.vocabulary import read_vocabulary, write_vocabulary
    from training.warm_start import start_from

    deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
    wanted = load_recipe(recipe, **({} if steps is None else {"steps": steps}))
    check_device(device, "--device")
    check_folder("--out", out)
    keep_freed_memory()
    manifest = read_data_manifest(data)
    target = _target(model or manifest.target.name)
    opened = open_model(wanted, target, manifest, read_vocabulary(vocabulary, manifest), device)
    begun = None if start is None else start_from(start, opened, target.folder)
    layers = opened.columns.layers
    shards, held_out = (
        read_shards(data, "train", layers=layers),
        read_shards(data, "validation", verify=False, layers=layers),
    )
    if fresh:
        forget_run(out)
    trainer = Trainer(
        opened.learner,
        shards,
        wanted,
        out,
        fresh_state(opened, begun),
        lambda: quick_score(opened.learner, held_out, 4, 8192),
        say=lambda text: stderr().print(text, style="yellow"),
    )
    if not any(len(each.tokens) - each.prompt_length >= 2 for each in held_out):
        stderr().print(
            "no held-out answer has two tokens: nothing tells which step is best, and the last one is exported; "
            "outrider train data makes more",
            style="yellow",
        )
    out.mkdir(parents=True, exist_ok=True)
    write_manifest(out, manifest)
    write_vocabulary(out, opened.vocabulary)
    if trainer.state.step:
        stderr().print(f"going on from step {trainer.state.step:,}")
    elif begun is None:
        fit_start(opened, shards)
    with _stopping() as stop, _bar(out, trainer.state.step, wanted.steps) as report:
        done = trainer.run(RunLimits(deadline=deadline, stop=stop), report)
    state = trainer.state
    stdout().print(
        f"{out}: step {state.step:,} of {wanted.steps:,}, {state.rows:,} predictions"
        + (f", best at step {state.best_step:,}: {state.best_score:.3f}" if state.best_score is not None else "")
        + ("" if done else "; run the same command to go on")
    )


def writer_of(folder: Path) -> str:
    """The model that wrote the text in a folder of data, or that which a run learns from.

    Raises:
        ConfigurationError: the folder has no manifest, or a damaged one.
    """
    from training.data_manifest import read_data_manifest

    return read_data_manifest(folder).target.name


def _target(model: str) -> TrainingTarget:
    from cluster.models.target import as_float32, resolve
    from training.open_run import TrainingTarget

    loaded = settings_of(None, None, model=model)
    folder = resolve(loaded.model, loaded.cache_dir, say=stderr().print).path
    return TrainingTarget(folder=folder, floats=lambda: as_float32(folder, say=stderr().print))


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C has come; a second one interrupts at once."""
    came: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _bar(out: Path, done: int, steps: int) -> Iterator[Callable[[StepProgress], None]]:
    """A progress bar, and a line for each step in the run's log."""
    from dataclasses import asdict

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    from training.curves import LOG

    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
    with Bars(*columns, console=stderr()) as bars, (out / LOG).open("ab", buffering=0) as log:
        task = bars.add_task("steps", total=steps, completed=done, figures="")

        def report(progress: StepProgress) -> None:
            minutes, seconds = divmod(int(progress.left_s), 60)
            figures = (
                f"loss {progress.loss:.3f}{_made_of(progress.losses)}, acceptance {progress.acceptance:.3f}, "
                f"{progress.rows_per_s:,.0f} rows/s, {minutes}:{seconds:02d} left"
            )
            bars.update(task, completed=progress.step, figures=figures)
            if progress.validation is not None:
                bars.console.print(f"step {progress.step:,}: {figures}, validation {progress.validation:.3f}")
            # A full disk is reported where checkpoints are written, which is worth more than this line.
            with suppress(OSError):
                log.write(json.dumps({key: _short(value) for key, value in asdict(progress).items()}).encode() + b"\n")

        yield report


def _made_of(losses: Mapping[str, float]) -> str:
    told = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
    return f" ({told})" if told else ""


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def evaluate(
    run_folder: Run,
    data: Data,
    model: Model = None,
    positions: Annotated[int, typer.Option(min=1, max=8, help="Tokens ahead that are measured.")] = 5,
    sequences: Annotated[int | None, typer.Option(min=1, help="Most held-out answers that are read. Default: all.")] = None,
    trees: Annotated[
        str, typer.Option(help="Sizes of trees that are replayed, comma-separated; empty: none.")
    ] = "8,16,31,60",
    tree_sequences: Annotated[
        int, typer.Option(min=1, help="Held-out answers of each domain that trees are replayed on.")
    ] = 8,
    device: Device = "cpu",
) -> None:
    """Measure a drafter on held-out text of the target, by domain: how many tokens of what is drafted are accepted.

    Prints a table, and writes evaluation.json beside the checkpoint; outrider train export puts it into training.json.
    """
    from dataclasses import replace
    from itertools import islice

    from cluster.checks.host import check_device
    from speculation.files import write_whole
    from training.data_manifest import read_data_manifest
    from training.evaluate import measure, tree_taus
    from training.export import EVALUATION
    from training.interruption import keep_freed_memory
    from training.open_run import check_same_target, reopen
    from training.shards import read_shards
    from training.snapshots import find_snapshot, read_snapshot, run_of

    sizes = tree_sizes(trees)
    check_device(device, "--device")
    keep_freed_memory()
    snapshot = find_snapshot(run_folder)
    state, tensors, _ = read_snapshot(snapshot)
    run_made = run_of(snapshot)
    opened = reopen(run_made, state, tensors, _target(model or writer_of(run_made)), device)
    check_same_target(data, read_data_manifest(data), opened.manifest)
    shards = read_shards(data, "validation", layers=opened.columns.layers)
    held_out = list(islice(shards, sequences))
    if not any(len(each.tokens) - each.prompt_length >= 2 for each in held_out):
        raise ConfigurationError(
            "no held-out answer has two tokens; outrider train data makes more", field="--data", verb="", value=data
        )
    with stderr().status(f"measuring {snapshot}"):
        opened.learner.module.eval()
        found = dict(measure(opened.learner, held_out, positions, opened.output))
        if sizes:
            source = opened.source()
            served = map(opened.as_served, held_out)
            for domain, (greedy, sampled) in tree_taus(source, served, sizes, tree_sequences, opened.layers).items():
                found[domain] = replace(found[domain], tree=greedy, tree_sampled=sampled)
    content = {domain: each.as_json() for domain, each in found.items()}
    write_whole(snapshot / EVALUATION, json.dumps({"step": state.step, "domains": content}, indent=1).encode())
    stdout().print(_table(found))
    if any(each.tree or each.tree_sampled for each in found.values()):
        stdout().print(_tree_table(found))
    stdout().print(f"{snapshot / EVALUATION}", soft_wrap=True)


def _table(found: Mapping[str, DomainFigures]) -> Any:
    from rich.table import Column, Table

    steps = len(found["all"].agreement)
    table = Table(
        Column("held-out answers", no_wrap=True),
        "tokens",
        *(f"{n + 1}." for n in range(steps)),
        "tau",
        "recall",
        "error of q",
    )
    for domain, each in found.items():
        for name, chances, tau in (
            ("same token", each.agreement, each.tau_greedy),
            ("1 - TV", each.overlap, each.tau_overlap),
        ):
            table.add_row(
                f"{domain}, {name}", f"{each.rows:,}", *(f"{chance:.3f}" for chance in chances), f"{tau:.2f}",
                f"{each.recall:.3f}", f"{each.calibration_error:.3f}",
            )  # fmt: skip
    return table


def _tree_table(found: Mapping[str, DomainFigures]) -> Any:
    from rich.table import Table

    sizes = sorted({size for each in found.values() for size in (*each.tree, *each.tree_sampled)})
    table = Table("tokens per pass, trees of", *(f"{size} nodes" for size in sizes))
    for domain, each in found.items():
        for name, taus in (("greedy text", each.tree), ("sampled text", each.tree_sampled)):
            if taus:
                table.add_row(f"{domain}, {name}", *(f"{taus[size]:.2f}" for size in sizes))
    return table


def tree_sizes(text: str) -> list[int]:
    """The sizes of trees that ``--trees`` names.

    Raises:
        ConfigurationError: they are none.
    """
    try:
        sizes = [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise ConfigurationError(
            field="--trees", verb="", value=text, allowed="whole numbers, comma-separated, such as 8,16"
        ) from error
    if any(not 1 <= size <= limits.MAX_TREE_NODES for size in sizes):
        raise ConfigurationError(field="--trees", verb="", value=text, allowed=f"from 1 to {limits.MAX_TREE_NODES}")
    return sizes


def export(
    run_folder: Run,
    out: Annotated[Path, typer.Option("--out", help="New folder for the drafter.")],
    model: Model = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "int8"],
        typer.Option(help="Of the weights written. int8: half of bfloat16, in blocks that only Outrider reads."),
    ] = "bfloat16",
    own_weights: Annotated[
        bool,
        typer.Option(
            "--own-weights",
            help="Of a draft model: leave out what is the target's own. Only Outrider reads it, with the target.",
        ),
    ] = False,
    layout: Annotated[
        Literal["authors", "speculators"] | None,
        typer.Option(
            help="Of a block drafter: that of DFlash's and DSpark's authors (default), or vLLM's speculators library."
        ),
    ] = None,
) -> None:
    """Write a trained drafter: safetensors and config.json as EAGLE, EAGLE-3, DSpark, Medusa and transformers have them, and
    training.json."""
    from training.export import check_new_folder, export_run
    from training.snapshots import find_snapshot, run_of

    check_new_folder(out)
    target = _target(model or writer_of(run_of(find_snapshot(run_folder))))
    snapshot = export_run(run_folder, target, out, dtype, own_weights=own_weights, layout=layout)
    stdout().print(f"{out}: {snapshot.name} of {snapshot.parent}", soft_wrap=True)


COMMANDS = (run, evaluate, export)
