"""``outrider bench stopping``: compares the policies for the length of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import settings_of
from speculation.errors import ConfigurationError, InvalidArgument

if TYPE_CHECKING:
    from cluster.models.target import ResolvedModel
    from cluster.settings.config import Settings


def stopping(
    draft: Annotated[
        Path | None, typer.Option(help="Folder of the draft model. Default: the one that comes along for the target.")
    ] = None,
    classifier: Annotated[
        Path | None,
        typer.Option(help="disco's, a .safetensors file of `outrider train disco`. Default: the draft model's own."),
    ] = None,
    prompts: Annotated[str, typer.Option(help="builtin, or a file, as for outrider bench.")] = "builtin",
    tuning: Annotated[
        str | None, typer.Option(help="Prompts for the best static length. Default: every second one of --prompts.")
    ] = None,
    per_task: Annotated[int | None, typer.Option(min=1, help="Most prompts of each task. Default: all.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy. Above, drafts are made with the request's noise.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measurements; the policies take turns.")] = 3,
    sweep: Annotated[int, typer.Option(min=1, max=64, help="Static lengths tried: from 1 to this.")] = 12,
    longest: Annotated[int, typer.Option(min=1, max=100, help="Most tokens of a draft, also of the oracle's.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Request number n has the seed SEED + n.")] = 1,
    out: Annotated[Path | None, typer.Option(help="New file for all measurements as JSON.")] = None,
    model: Annotated[str | None, typer.Option(help="The target: Hugging Face name, folder or .gguf file.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting, section.key=value. Repeatable.")] = None,
) -> None:
    """Compare when a draft model should stop: static lengths, heuristics, confidence, entropy, DISCO and an oracle.

    One request at a time; draft and target run by turns, and every pass is timed. All policies draft for the same text.
    Exit code 1: a policy changed a token.
    """
    from benchmarks.bench.prompts import read_prompts
    from benchmarks.bench.tables import render
    from benchmarks.stopping.lineup import StoppingBench, StoppingConfig, fastest_length, with_room
    from benchmarks.stopping.report import comparison_object, length_table, policy_table, summaries
    from benchmarks.stopping.run import Comparison, compare_policies
    from cluster.models.drafters import trained_config
    from cluster.models.target import resolve
    from cluster.process.terminal import progress, stderr, stdout
    from cluster.settings.component_configs import verifier_config
    from speculation.files import write_whole
    from speculation.types import SamplingParams

    try:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    except InvalidArgument as error:
        raise ConfigurationError(field=f"--{error.field}", value=error.value, allowed=error.allowed) from error
    if out is not None and out.exists():
        raise ConfigurationError("it exists; name a new file, so that no result is lost", field="--out", value=out)
    loaded = settings_of(config, settings, model=model)
    resolved = resolve(loaded.model, loaded.cache_dir, say=stderr().print)
    draft, classifier = _drafting(loaded, resolved, draft, classifier)
    target = verifier_config(loaded, resolved).target
    bench = StoppingBench(
        StoppingConfig(
            target=with_room(target, target.cache_tokens), draft=draft, classifier=classifier,
            stop=trained_config(loaded).stop, params=params, sweep=sweep, longest=longest, seed=seed,
            prompts=read_prompts(prompts, per_task),
            tuning=None if tuning is None else read_prompts(tuning, per_task, "--tuning"),
        )
    )  # fmt: skip
    try:
        with progress("Static lengths", (1 + sweep) * len(bench.tuning)) as advance:
            tried = bench.static_lengths(advance)
        contestants = bench.contestants(fastest_length(tried))
        with progress("Policies", (2 + len(contestants)) * len(bench.requests) * repeats) as advance:
            found = compare_policies(bench.decoder, bench.requests, contestants, repeats, longest, advance)
    finally:
        bench.target.shutdown()
    several, console = summaries(found), stdout()
    swept = summaries(Comparison(runs=tuple(tried), oracle={}, changed=()))
    for table in (
        policy_table(swept, "Static lengths, on the prompts for tuning"),
        policy_table(several, "Policies"),
        length_table(several),
    ):
        console.print(render(table))
    if out is not None:
        write_whole(out, json.dumps(comparison_object(found, several), indent=1).encode())
    if found.changed:
        console.print(f"[bold red]NOT LOSSLESS: {', '.join(found.changed)} changed tokens[/bold red]")
        raise typer.Exit(1)


def _drafting(
    settings: Settings, model: ResolvedModel, draft: Path | None, classifier: Path | None
) -> tuple[Path, Path | None]:
    """The folder of the draft model, and its classifier, if there is one; those that are named go first.

    Raises:
        ConfigurationError: no draft model comes along for the target.
    """
    from cluster.models.drafters import draft_models
    from cluster.process.terminal import stderr
    from services.drafter.stopping.policies import classifier_of

    if draft is None:
        if (found := draft_models(settings, model).get("draft_model")) is None:
            raise ConfigurationError(
                "name its folder; outrider train run --recipe draft_model trains one",
                field="--draft",
                verb="",
                value=f"none comes along for {model.name}",
            )
        draft = found.folder
    classifier = classifier or classifier_of(draft)
    if classifier is None:
        stderr().print(
            f"disco takes no part: {draft} has no classifier, and --classifier names no file of outrider train disco",
            markup=False,
            soft_wrap=True,
        )
    return draft, classifier
