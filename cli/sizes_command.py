"""``outrider bench sizes``: from which size of the target on does each drafter pay on this machine?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.bench_options import check_new_folder, make_folder, read_names, read_numbers
from cli.options import settings_of
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from benchmarks.sizes.run import MeasuredSizes
    from cluster.models.target import ResolvedModel
    from cluster.settings.config import Settings

_EPILOG = """\
What runs: the default model with every drafter alone, with n-grams (suffix and recycling) alone and with both, one request
at a time, on the same prompts; every draft is waited for, and answers are compared with plain decoding's. Then, for each
size, a few layers of a target of that shape with random weights, and each head at that width.

What is assumed: the tokens per pass of other sizes are the default model's. What drafters cost is measured at every size.

Examples:

outrider bench sizes --quick

outrider bench sizes --drafters fspad,/weights/block --sizes 1,7 --nodes 8,31 --out sizes
"""
_QUICK = {"per_task": 1, "max_tokens": 32, "nodes": "15", "repeats": 3, "drafts": 6}
_WHOLE = {"per_task": 2, "max_tokens": 128, "nodes": "7,15,31", "repeats": 7, "drafts": 16}


def sizes(
    drafters: Annotated[
        str | None,
        typer.Option(help="Comma-separated: names of drafters that come along, and folders. Default: all that come along."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Targets' billions of parameters, comma-separated: 0.5, 1, 3 and 7 are known.")
    ] = "0.5,1,3,7",
    nodes: Annotated[
        str | None, typer.Option(help="Most nodes of a tree; several are tried. Default: 7,15,31; with --quick, 15.")
    ] = None,
    prompts: Annotated[str, typer.Option(help="builtin, or a file, as for outrider bench.")] = "builtin",
    per_task: Annotated[
        int | None, typer.Option(min=1, help="Most prompts of each task. Default: 2; with --quick, 1.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=4, help="Most tokens of an answer. Default: 128; with --quick, 32.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few prompts, one size of trees, few repeats: some minutes on two cores.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Request number n has the seed SEED + n.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="New folder for results.json, report.html, report.md and the plot.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of Markdown.")] = False,
    model: Annotated[str | None, typer.Option(help="The target: Hugging Face name, folder or .gguf file.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="One setting, section.key=value. Repeatable.")] = None,
) -> None:
    """From which size of the target on does each drafter pay? Tokens per pass, costs, speed-ups, as Markdown tables.

    Tokens per pass are measured with the default model and assumed for larger ones; costs are measured at every size. Run it
    with nothing else running. Exit code 1: an answer was not plain decoding's.
    """
    from benchmarks.bench import environment
    from benchmarks.bench.plots import check_installed
    from benchmarks.bench.prompts import read_prompts
    from benchmarks.bench.tables import markdown
    from benchmarks.sizes.report import as_object, tables_of, write_sizes_report
    from benchmarks.sizes.run import SizesConfig, measure_sizes
    from benchmarks.sizes.stack import read_sizes
    from cluster.process.terminal import stderr
    from services.machine.processor import cores

    usual: dict[str, Any] = _QUICK if quick else _WHOLE
    budgets = read_numbers("--nodes", usual["nodes"] if nodes is None else nodes, most=128)
    named = read_sizes(sizes)
    asked = read_prompts(prompts, per_task or usual["per_task"])
    if out is not None:
        check_installed()
        check_new_folder(out)
    loaded, resolved = _target(drafters, model, config, settings)
    measuring = SizesConfig(
        settings=loaded, model=resolved, prompts=asked, max_tokens=max_tokens or usual["max_tokens"], seed=seed,
        budgets=budgets, sizes=named, repeats=usual["repeats"], drafts=usual["drafts"],
    )  # fmt: skip
    notes = stderr()
    with notes.status("bench sizes") as status:
        found = measure_sizes(measuring, told=status.update)
    about = {
        "command": environment.typed(),
        "model": resolved.name,
        "prompts": len(asked),
        "max_tokens": measuring.max_tokens,
        "environment": environment.describe(loaded.verifier.threads or cores()),
    }
    if as_json:
        typer.echo(json.dumps(as_object(found, about)))
    else:
        typer.echo("\n".join(markdown(table) for table in tables_of(found)))
    if out is not None:
        make_folder(out)
        write_sizes_report(found, about, out)
        notes.print(f"Report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    _check_answers(found)


def _target(
    drafters: str | None, model: str | None, config: Path | None, flags: list[str] | None
) -> tuple[Settings, ResolvedModel]:
    """Settings with the drafters that are asked for, and the model's folder."""
    from benchmarks.papers.engine import SETTINGS
    from cluster.models.drafters import bundled
    from cluster.models.target import resolve
    from cluster.process.terminal import stderr

    given = [*(flags or []), *SETTINGS]
    loaded = settings_of(config, given, model=model)
    resolved = resolve(loaded.model, loaded.cache_dir, say=stderr().print)
    if drafters is not None:
        along = {folder.name: folder for folder in bundled(resolved.name)}
        folders = [_folder(name, along) for name in read_names(drafters)]
        named = json.dumps([str(folder) for folder in folders])
        loaded = settings_of(config, given, model=model, **{"drafter.models": named})
    return loaded, resolved


def _folder(name: str, along: dict[str, Path]) -> Path:
    """The folder of a drafter that comes along, or the one that is named."""
    folder = along.get(name, Path(name).expanduser())
    if not (folder / "config.json").is_file():
        allowed = f"one of {', '.join(sorted(along))}, or folders of drafters, comma-separated"
        raise ConfigurationError(field="--drafters", value=name, allowed=allowed)
    return folder.resolve()


def _check_answers(found: MeasuredSizes) -> None:
    from cluster.process.terminal import stdout

    if found.changed:
        stdout().print(f"[bold red]NOT LOSSLESS: {', '.join(found.changed)}[/bold red]", soft_wrap=True)
        raise typer.Exit(1)


EPILOG = _EPILOG.replace("\n\n", "\0").replace("\n", " ").replace("\0", "\n\n")
