"""``outrider train disco``: the classifier that says when a draft model should stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.options import settings_of
from cli.train_run_commands import Data, Model, writer_of
from cluster.process.terminal import stderr, stdout
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.drafter.stopping.transfer import TransferCell
    from training.make_disco import MadeDisco


def disco(
    data: Data,
    draft: Annotated[Path, typer.Option(help="Folder of the draft model.")],
    out: Annotated[Path, typer.Option("--out", help="New .safetensors file; a .json file comes beside it.")],
    model: Model = None,
    cost_ratio: Annotated[
        float | None, typer.Option(min=0, help="A pass of the draft model over one of the target. Default: measured.")
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Most answers of each split of the data.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="Of the answers that are used.")] = 0.0,
    examples: Annotated[
        Literal["chains", "judged"],
        typer.Option(help="chains: also tokens drafted behind wrong ones; judged: as in the paper, without."),
    ] = "chains",
    labels: Annotated[
        Literal["hard", "soft"],
        typer.Option(
            help="hard: whether the target took a token; soft: how likely it takes one (1 - TV), above temperature 0."
        ),
    ] = "hard",
    longest: Annotated[int, typer.Option(min=2, max=256, help="Most tokens of a draft while examples are made.")] = 48,
    beyond: Annotated[int, typer.Option(min=0, max=64, help="Tokens drafted behind the first wrong one.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the draft model: cpu or cuda.")] = "cpu",
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer",
            help="Also train one on each kind of prompts (the name of their file), and try it on every other kind: into "
            "transfer.json beside --out.",
        ),
    ] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting of the target. Repeatable.")] = None,
) -> None:
    """Train DISCO's classifier, which says after each drafted token whether the target will accept it.

    Examples are drafts behind the target's own text. The threshold and the most tokens are those that cost least on the
    validation split, where a pass of the draft model costs the ratio c of a pass of the target.
    """
    from cluster.checks.host import check_device
    from cluster.models.drafters import by_kernels
    from cluster.models.target import resolve
    from cluster.settings.component_configs import verifier_config
    from services.drafter.config import DrafterConfig, TrainedConfig
    from services.drafter.draft_model.source import NAME, make
    from services.drafter.heads.files.target_rows import read_target_rows
    from services.drafter.stopping.transfer import transfer_file, write_transfer
    from training.disco import DiscoRecipe
    from training.make_disco import DiscoOptions, check_labels, known_answers, make_disco, measured_cost, transfer_cells
    from training.open_run import output_of
    from training.soft_labels import SoftLabels

    if out.suffix != ".safetensors":
        raise ConfigurationError("must end in .safetensors", field="--out", value=out)
    if out.exists() or out.with_suffix(".json").exists():
        raise ConfigurationError("it or its .json file exists; name a new file", field="--out", value=out)
    check_labels(labels, temperature)
    check_device(device, "--device")
    loaded = settings_of(None, settings, model=model or writer_of(data))
    resolved = resolve(loaded.model, loaded.cache_dir, say=stderr().print)
    # The chain alone, as it is stopped.
    trained = TrainedConfig(
        checkpoints={NAME: draft}, target=resolved.path, device=device, eagle_topk=1, draft_kernels=by_kernels
    )
    source = make(DrafterConfig(trained=trained))
    options = DiscoOptions(
        data=data, draft=draft, target=resolved.path, most=answers, temperature=temperature, longest=longest,
        beyond=beyond, examples=examples, labels=labels, recipe=DiscoRecipe(steps=steps, seed=seed),
    )  # fmt: skip
    soft = None
    if labels == "soft":
        soft = SoftLabels(source, output_of(read_target_rows(resolved.path, device="cpu", whole=True)), temperature)
    known = known_answers(options, soft)
    c = cost_ratio
    if c is None:
        c = measured_cost(verifier_config(loaded, resolved).target, source.with_stop, NAME, known["validation"])
    from rich.progress import Progress

    with Progress(console=stderr(), transient=True) as bars:
        task = bars.add_task("Drafting behind answers", total=sum(map(len, known.values())))
        made = make_disco(options, known, source.with_stop, NAME, c, lambda: bars.advance(task))
        bars.update(task, description="Drafting behind answers of each kind", total=None)
        cells = transfer_cells(options, source.with_stop, NAME, c, lambda: bars.advance(task)) if transfer else []
    made.classifier.write(out, made.card)
    _report(out, made)
    if cells:
        write_transfer(transfer_file(out), cells)
        _report_transfer(cells)


def _report(out: Path, made: MadeDisco) -> None:
    choice, c = made.choice, made.c
    stdout().print(
        f"{out}: F1 {100 * made.quality.f1:.1f} %, AUC {100 * made.quality.auc:.1f} %; stops below {choice.theta}, or at "
        f"{choice.max_tokens} tokens",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for name, passes in (
        (f"static {choice.static}, the best", choice.static_passes), ("disco", choice.disco), ("oracle", choice.oracle)
    ):  # fmt: skip
        stdout().print(
            f"  {name}: {passes.target:,} passes of the target, {passes.draft:,} of the draft model for {passes.tokens:,} "
            f"tokens; {1 / passes.cost(c):.2f}x of plain decoding at c = {c:.3f}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _report_transfer(cells: list[TransferCell]) -> None:
    for cell in cells:
        stdout().print(
            f"  trained on {cell.trained}, on {cell.measured}: F1 {100 * cell.f1:.1f} %, AUC {100 * cell.auc:.1f} %, "
            f"{cell.speed:.2f}x of plain decoding",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
