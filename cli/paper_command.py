"""``outrider paper``: the experiments of five papers, rerun here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.paper_indexes import NamedIndexes
from cli.paper_settings import check_settings, where_computed
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from benchmarks.papers.page import PaperSection
    from benchmarks.papers.workbench import Workbench

app = typer.Typer(
    no_args_is_help=True,
    help="Rerun a paper's experiments: rows as the paper names them, each compared with plain decoding. Training runs, "
    "indexes and weights of your own make further rows (docs/how-to/papers.md).",
    epilog="Try: outrider paper blog --quick, then outrider paper page outrider-paper-blog-quick --out papers.md",
)

Prompts = Annotated[str, typer.Option(help="builtin, or a file; outrider bench --help names the forms.")]
Model = Annotated[str | None, typer.Option(help="The target: Hugging Face name, folder or .gguf file.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="One prompt of each task, 32 tokens: at most ten minutes on two quiet cores.")
]
PerTask = Annotated[int | None, typer.Option(min=1, help="Most prompts of each task. Default: all; with --quick, 1.")]
MaxTokens = Annotated[int | None, typer.Option(min=2, help="Most tokens of an answer. Default: 256; with --quick, 32.")]
Seed = Annotated[int, typer.Option(min=0, help="Request number n has the seed SEED + n.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the results. A second call goes on where it was. Default: outrider-paper-NAME[-quick]."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")]
Drafters = Annotated[
    list[Path] | None,
    typer.Option("--drafter", help="Folder of a drafter's weights. Repeatable. Default: those that come along."),
]
Index = Annotated[Path | None, typer.Option(help="Index of documents of low perplexity, for rows that look up.")]
UnfilteredIndex = Annotated[Path | None, typer.Option(help="Index of all documents (outrider index build --keep 1).")]
OtherIndex = Annotated[
    list[Path] | None,
    typer.Option(
        help="Index of documents that were kept in another way (outrider index build --keep-by, --score-tokens), for a row "
        "of its own. Repeatable."
    ),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(
        help="Where no index is named, all are built from these: a .jsonl file, a text file or a folder of them. "
        "Repeatable. Default: the modules of Python's standard library."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, such as verifier.device=cuda; those that rows decide are refused. Repeatable."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    prompts: str
    model: str | None
    quick: bool
    per_task: int | None
    max_tokens: int | None
    seed: int
    out: Path | None
    as_json: bool
    settings: Sequence[str] = ()
    drafters: list[Path] | None = None
    # A task of DISCO needs a prompt for tuning, and one to be measured.
    quick_per_task: int = 1
    ablation: Sequence[Path] = ()


@app.command()
def spectra(
    prompts: Prompts = "builtin",
    model: Model = None,
    quick: Quick = False,
    per_task: PerTask = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 1,
    out: Out = None,
    as_json: Json = False,
    settings: Set = None,
    index: Index = None,
    unfiltered_index: UnfilteredIndex = None,
    other_index: OtherIndex = None,
    corpus: Corpus = None,
) -> None:
    """SPECTRA: Table 1 greedy and at temperature 1, Table 2 with all ablations, Tables 4 and 5, Figures 3 and 6.

    Rows that look up (REST, RETRIEVAL, full SPECTRA) look up in two indexes: name --index and --unfiltered-index, or have
    both built from a corpus, and two more whose documents were kept by tokens and by length. Each --other-index has a row
    of its own.
    """
    if corpus and (index or unfiltered_index):
        raise ConfigurationError(
            "is for runs that name no index", field="--corpus", verb="", value=corpus[0], given="with --index"
        )
    options = _Options(
        prompts=prompts, model=model, quick=quick, per_task=per_task, max_tokens=max_tokens, seed=seed, out=out,
        as_json=as_json, settings=settings or (),
    )  # fmt: skip
    named = index is not None or unfiltered_index is not None
    indexes = NamedIndexes(
        index=index, unfiltered_index=unfiltered_index, others=other_index or (), corpus=None if named else corpus or ()
    )
    _measure("spectra", options, indexes)


@app.command()
def disco(
    prompts: Prompts = "builtin",
    model: Model = None,
    quick: Quick = False,
    per_task: PerTask = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 1,
    out: Out = None,
    as_json: Json = False,
    settings: Set = None,
    drafter: Drafters = None,
    classifier: Annotated[
        Path | None, typer.Option(help="The .safetensors file of outrider train disco. Default: the draft model's own.")
    ] = None,
) -> None:
    """DISCO: Tables 1 and 2, F1 (Table 4), Figures 2, 5 and 6, for every task that has two prompts.

    Every second prompt of a task is for tuning: --quick takes two of each task. The classifier's threshold is the fastest
    one on these.
    """
    options = _Options(
        prompts=prompts, model=model, quick=quick, per_task=per_task, max_tokens=max_tokens, seed=seed, out=out,
        as_json=as_json, settings=settings or (), drafters=drafter, quick_per_task=2,
    )  # fmt: skip
    _measure("disco", options, classifier=classifier)


@app.command()
def fspad(
    prompts: Prompts = "builtin",
    model: Model = None,
    quick: Quick = False,
    per_task: PerTask = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 1,
    out: Out = None,
    as_json: Json = False,
    settings: Set = None,
    drafter: Drafters = None,
    ablation: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Folder of outrider train run, for Table 3 and Figure 3: of the recipes eagle_matched, "
            "fspad_alignment_only, fspad_sampler_only and fspad, each with several seeds, on the same data for as many "
            "steps. Repeatable.",
        ),
    ] = None,
) -> None:
    """FSPAD: Table 1 with PLD, Lookahead, Medusa and EAGLE-2, Table 2 with half the tree; EAGLE-2's and best-first trees.

    Rows of heads that are not there are left out; the page says how to train them. EAGLE-3 stands beside EAGLE-2 where
    --drafter names weights of it. Table 3 (the parts one by one) and Figure 3 (the losses by step) are made of the training
    runs that --ablation names: their heads are exported, and decode the same prompts.
    """
    options = _Options(
        prompts=prompts, model=model, quick=quick, per_task=per_task, max_tokens=max_tokens, seed=seed, out=out,
        as_json=as_json, settings=settings or (), drafters=drafter, ablation=ablation or (),
    )  # fmt: skip
    _measure("fspad", options)


# Papers that need nothing else, and what their commands say of themselves.
_OTHERS = {
    "streaming": "Speculative Streaming: Table 1 with Medusa, Table 2 with a draft model beside it, and fewer streams "
    "(gamma).\n\nStreams that were trained with the target (main_weight in their recipe) are a row that says other tokens, "
    "where --drafter names them beside others.",
    "blog": "The blog: speculative sampling with a draft model, and n-gram decoding, against plain decoding.",
}


def _add_command(name: str, about: str) -> None:
    @app.command(name, help=about)
    def rerun(
        prompts: Prompts = "builtin",
        model: Model = None,
        quick: Quick = False,
        per_task: PerTask = None,
        max_tokens: MaxTokens = None,
        seed: Seed = 1,
        out: Out = None,
        as_json: Json = False,
        settings: Set = None,
        drafter: Drafters = None,
    ) -> None:
        options = _Options(
            prompts=prompts, model=model, quick=quick, per_task=per_task, max_tokens=max_tokens, seed=seed, out=out,
            as_json=as_json, settings=settings or (), drafters=drafter,
        )  # fmt: skip
        _measure(name, options)


for _name, _about in _OTHERS.items():
    _add_command(_name, _about)


@app.command()
def page(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of outrider paper's results, one for each paper.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page; its plots come into the folder plots/papers beside it.")] = Path(
        "papers.md"
    ),
) -> None:
    """Make one page of the results so far: a section for each paper, with the paper's own figures in the last column."""
    from benchmarks.papers.catalogue import NAMES
    from benchmarks.papers.page import write_page

    sections = [_section(folder) for folder in folders or ()]
    names = [section.paper.name for section in sections]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            "two folders hold runs of one paper: name one", field="FOLDERS", verb="", value=", ".join(names)
        )
    sections.sort(key=lambda section: NAMES.index(section.paper.name))
    write_page(out, sections, [name for name in NAMES if name not in names], out.parent / "plots" / "papers")


def _measure(name: str, options: _Options, indexes: NamedIndexes | None = None, classifier: Path | None = None) -> None:
    from benchmarks.bench.environment import typed
    from benchmarks.bench.plots import check_installed
    from benchmarks.bench.prompts import read_prompts
    from benchmarks.papers.catalogue import experiment_of
    from benchmarks.papers.engine import SETTINGS
    from benchmarks.papers.page import section_text
    from benchmarks.papers.run import changed_answers, measure_units
    from benchmarks.papers.shared_streams import is_shared, shared_streams
    from benchmarks.papers.store import PaperFolder
    from benchmarks.papers.workbench import PaperConfig, Workbench
    from cli.paper_ablation import trained_runs
    from cluster.models.target import resolve
    from cluster.process.terminal import progress, stderr, stdout
    from cluster.settings.config import load

    # Mistakes are found before anything is loaded.
    check_installed()
    per_task = options.per_task or (options.quick_per_task if options.quick else None)
    max_tokens = options.max_tokens or (32 if options.quick else 256)
    prompts = read_prompts(options.prompts, per_task)
    named = [] if options.model is None else [f"model={options.model}"]
    drafters = [folder.expanduser().resolve() for folder in options.drafters or ()]
    tuned = [folder for folder in drafters if name == "streaming" and is_shared(folder)]
    if served := [str(folder) for folder in drafters if folder not in tuned]:
        named.append(f"drafter.models={json.dumps(served)}")
    check_settings(options.settings, SETTINGS)
    settings = load(flags=[*options.settings, *SETTINGS, *named])
    model = resolve(settings.model, settings.cache_dir, say=stderr().print)
    looked_up = indexes or NamedIndexes()
    out = options.out or Path(f"outrider-paper-{name}{'-quick' if options.quick else ''}")
    config = PaperConfig(
        settings=settings, model=model, prompts=prompts, max_tokens=max_tokens, seed=options.seed,
        repeats=1 if options.quick else 3, classifier=classifier, **looked_up.folders(model, settings.cache_dir),
        ablation=trained_runs(options.ablation, model, out / "heads"),
        shared=shared_streams(tuned, model.path, out / "shared"),
    )  # fmt: skip
    bench = Workbench(config)
    experiment = experiment_of(name, bench)
    told = {
        "command": typed(),
        "requests": bench.answers,
        "units": [unit.name for unit in experiment.units],
        "deviations": (*experiment.deviations, *looked_up.notes),
    }
    folder = PaperFolder(out, _identity(name, options, bench), told)
    try:
        measure_units(experiment.units, folder, progress)
    except KeyboardInterrupt:
        stderr().print(f"[yellow]Interrupted: the same command goes on where it was[/yellow] ({out})")
        raise typer.Exit(130) from None
    finally:
        bench.close()
    section = _section(out)
    _write_report(out, section)
    if options.as_json:
        typer.echo(json.dumps(section.as_object(), ensure_ascii=False))
    else:
        stdout().print(section_text(section), markup=False, highlight=False, soft_wrap=True)
    if changed_answers(section.results):
        raise typer.Exit(1)


def _identity(name: str, options: _Options, bench: Workbench) -> dict[str, Any]:
    """All that a result depends on besides the code."""
    from benchmarks.bench.environment import without_passwords
    from retrieval_index.manifest import read_manifest
    from services.machine.processor import cores, processor
    from services.model_files.folder import model_fingerprint
    from services.verifier.kernels.native.library import instructions

    config = bench.config
    named = [("index", config.index), ("unfiltered_index", config.unfiltered_index)]
    named += [(f"other_index_{number}", folder) for number, folder in enumerate(config.other_indexes, 1)]
    versions = {key: read_manifest(folder).version for key, folder in named if folder is not None}
    asked = [[prompt.task, prompt.id, prompt.system, *prompt.turns] for prompt in config.prompts]
    return {
        "paper": name,
        "model": config.model.name,
        "weights": model_fingerprint(config.model.path)[:16],
        "prompts": options.prompts,
        "prompts_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16],
        "max_tokens": config.max_tokens,
        "seed": config.seed,
        "quick": options.quick,
        "processor": processor(),
        "instructions": instructions(),
        "threads": config.settings.verifier.threads or cores(),
        # What is as usual is not there, as in folders of older versions.
        "settings": sorted(map(without_passwords, options.settings)) or None,
        **where_computed(config.settings),
        "classifier": _digest(bench.classifier if name == "disco" else None),
        "drafters": {name: model_fingerprint(each.folder)[:16] for name, each in sorted(bench.checkpoints.items())},
        **versions,
        **({"ablation": {run.name: run.weights for run in config.ablation}} if config.ablation else {}),
        **({"shared": model_fingerprint(config.shared.folder)[:16]} if config.shared else {}),
    }


def _digest(file: Path | None) -> str | None:
    """Tells versions of a file apart."""
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigurationError(f"{error.strerror}", field="--classifier", value=file) from error


def _section(folder: Path) -> PaperSection:
    from benchmarks.papers.catalogue import paper_of
    from benchmarks.papers.page import PaperSection
    from benchmarks.papers.store import read_run

    run, results = read_run(folder)
    return PaperSection(paper=paper_of(run["paper"]), run=run, results=results)


def _write_report(out: Path, section: PaperSection) -> None:
    """The run's own page, plots and JSON, in its folder."""
    from benchmarks.papers.page import write_page

    write_page(out / "report.md", [section], (), out / "plots")
    (out / "results.json").write_text(json.dumps(section.as_object(), indent=1, ensure_ascii=False) + "\n")
