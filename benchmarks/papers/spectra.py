"""SPECTRA (Le et al., ACL 2025): Tables 1, 2, 4 and 5, Figures 3 and 6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench.tables import Table
from benchmarks.papers.engine import RowDrafting
from benchmarks.papers.rows import Column, DecodedRow, figure_table, macro_speed_up, speed_up, usual_columns
from benchmarks.papers.units import Experiment, Paper, Results
from benchmarks.papers.workbench import Workbench
from retrieval_index.manifest import Manifest, read_manifest
from services.drafter.config import SpectraConfig
from services.drafter.sources.spectra import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The window's nodes and the guesses' of N = 5, W = 15, G = 15, both of which the paper checks in every pass.
_NODES = 120
_RETRIEVED_NODES = 60
_REST_NODES = 64
_LABELLED = "figure 3"
_OTHER = "retrieval-other-"

Change = Callable[[SpectraConfig], SpectraConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of Tables 1 and 2. ``index``: which one it looks up in."""

    name: str
    label: str
    paper: str
    sources: tuple[str, ...]
    nodes: int = _NODES
    index: str = ""
    change: Change = lambda config: config


# Table 2's figures: speed-up and tau on GSM8K; on MT-bench. ANPD stands in Table 1 alone.
_GREEDY = (
    _Row(name="anpd", label="ANPD", paper="1.43x", sources=("anpd",), nodes=8),
    _Row(
        name="rest", label="REST", paper="1.01x, 1.47; 1.25x, 1.90", sources=("retrieval",), nodes=_REST_NODES,
        index="unfiltered",
    ),
    _Row(name="lookahead", label="Lookahead", paper="1.66x, 1.93; 1.73x, 2.05", sources=("lookahead",)),
    _Row(
        name="lookahead-rest", label="Lookahead + REST", paper="1.08x, 1.47; 1.27x, 1.90",
        sources=("lookahead", "retrieval"), index="unfiltered",
    ),
    _Row(name="core", label="CORE Module", paper="2.04x, 2.50; 1.92x, 2.35", sources=("spectra_core",)),
    _Row(
        name="core-no-forward", label="- w/o Forward Dict", paper="1.50x, 1.68; 1.20x, 1.37", sources=("spectra_core",),
        change=lambda config: replace(config, forward=False),
    ),
    _Row(
        name="core-no-backward", label="- w/o Backward Dict", paper="1.94x, 2.21; 1.74x, 2.12",
        sources=("spectra_core",), change=lambda config: replace(config, backward=False),
    ),
    _Row(
        name="core-no-sub-ngrams", label="- w/o Sub-Ngram", paper="1.95x, 2.34; 1.75x, 2.18", sources=("spectra_core",),
        change=lambda config: replace(config, sub_ngrams=False),
    ),
    _Row(
        name="retrieval", label="RETRIEVAL Module", paper="1.18x, 1.31; 1.24x, 1.50", sources=("retrieval",),
        nodes=_RETRIEVED_NODES, index="filtered",
    ),
    _Row(
        name="retrieval-unfiltered", label="- w/o PPL refine", paper="1.16x, 1.29; 1.20x, 1.45", sources=("retrieval",),
        nodes=_RETRIEVED_NODES, index="unfiltered",
    ),
    _Row(
        name="spectra", label="SPECTRA", paper="2.14x, 2.64; 2.02x, 2.59", sources=("spectra",), index="filtered",
    ),
)  # fmt: skip
_SAMPLED = {"anpd": "1.26x", "lookahead": "1.59x", "rest": "1.14x", "core": "–", "spectra": "1.85x"}
_GREEDY_TABLE_1 = {"anpd": "1.43x", "lookahead": "1.82x", "rest": "1.21x", "core": "–", "spectra": "2.14x"}

_DEVIATIONS = (
    "The paper's target is Llama-2-7B-Chat on an A100 in float16; ours is named above, and both sides of a ratio ran here. "
    "On a CPU a pass of 120 nodes costs many times a plain one, so τ can be compared with the paper's, speed-ups cannot.",
    "Much of the paper's Table 1 repeats rows by mistake, so its column has the mean speed-ups that its Table 4 gives for "
    "Llama-2-7B-Chat; Table 2's column has speed-up and τ on GSM8K, then on MT-bench.",
    "As printed, the window explores with probability 0.9 and both branches take the argmax; here it explores with 0.1, and "
    "takes a token that the forward dictionary lacks. The backward guess comes first: behind a full forward list it would "
    "never be checked.",
    "Where internal guesses fill all 15 places, the index keeps one of them.",
    "Lookahead + REST are blended into one tree by calibrated probabilities, without Lookahead's window; the paper appends "
    "one list to the other; `sources: [lookahead, rest]` asks for it.",
    "REST and w/o PPL refine look up in an index of all documents, RETRIEVAL and SPECTRA in one of those of low perplexity.",
    "The paper keeps 100,000 documents by the perplexity of each as a whole. Here a share is kept by that of their "
    "beginnings, unless a row of the table of filters says otherwise.",
    "Figure 3 counts guesses of CORE, and of the index where there is one, within the limit of 15 guesses.",
)


def spectra(bench: Workbench) -> Experiment:
    """The experiments. Rows that look up are there if an index is."""
    folders = {"filtered": bench.config.index, "unfiltered": bench.config.unfiltered_index, "": None}
    rows = [row for row in _GREEDY if not row.index or folders[row.index] is not None]
    best = rows[-1] if rows[-1].name == "spectra" else next(row for row in rows if row.name == "core")
    labelled = replace(best, name="guesses", label=_LABELLED, change=lambda config: replace(config, label_guesses=True))
    units = [
        *(_unit(bench, row, folders[row.index]) for row in rows),
        _unit(bench, labelled, folders[best.index]),
        *(
            _unit(bench, replace(row, name=f"{row.name}-sampled", paper=_SAMPLED[row.name]), folders[row.index], 1.0)
            for row in rows
            if row.name in _SAMPLED
        ),
    ]
    units += [_unit(bench, row, folder) for row, folder in _other_filters(bench)]
    lacking = sorted({row.index for row in _GREEDY if row.index and folders[row.index] is None})
    return Experiment(units=units, deviations=(*_DEVIATIONS, *map(_how_to_build, lacking)))


def _other_filters(bench: Workbench) -> list[tuple[_Row, Path]]:
    """RETRIEVAL over indexes whose documents were kept in other ways, a row each."""
    retrieval = next(row for row in _GREEDY if row.name == "retrieval")
    return [
        (replace(retrieval, name=f"{_OTHER}{number}", paper="–"), folder)
        for number, folder in enumerate(bench.config.other_indexes, 1)
    ]


def _how_to_build(index: str) -> str:
    option = "--index" if index == "filtered" else "--unfiltered-index"
    kept = "" if index == "filtered" else " --keep 1"
    return (
        f"Rows that look up in an index of {'documents of low perplexity' if index == 'filtered' else 'all documents'} are "
        f"left out: `outrider index build --corpus CORPUS --out FOLDER{kept}` makes one, and `{option} FOLDER` names it."
    )


def _unit(bench: Workbench, row: _Row, index: Path | None, temperature: float = 0.0) -> DecodedRow:
    def drafting() -> RowDrafting:
        config = bench.engine().config
        config = replace(config, spectra=row.change(config.spectra))
        return RowDrafting(sources=row.sources, nodes=row.nodes, config=config, index=index)

    return bench.row(
        name=row.name,
        label=row.label,
        paper=row.paper,
        drafting=drafting,
        temperature=temperature,
        extra=lambda: {} if index is None else {"index": _about(read_manifest(index))},
    )


def _about(index: Manifest) -> str:
    return f"{index.filter}: {index.kept:,} of {index.documents:,} documents, {index.tokens:,} tokens"


def _tables(results: Results) -> list[Table]:
    ablations = [row.name for row in _GREEDY if row.name != "anpd"]
    sampled = [f"{name}-sampled" for name in _SAMPLED]
    first = list(_GREEDY_TABLE_1)
    # The same rows stand in both tables, beside other figures of the paper.
    of_table_1 = {name: {**results[name], "paper": _GREEDY_TABLE_1[name]} for name in first if name in results}
    pace = [
        Column(title="micro", figure=lambda answers: f"{speed_up(answers):.2f}x"),
        Column(title="macro", figure=lambda answers: f"{macro_speed_up(answers):.2f}x"),
    ]
    tables = [
        figure_table("Table 1, greedy", first, of_table_1, usual_columns(results, first)),
        figure_table("Table 1, temperature 1", sampled, results, usual_columns(results, sampled)),
        figure_table("Table 2: ablations, greedy", ablations, results, usual_columns(results, ablations)),
        figure_table(
            "Tables 4 and 5: throughput over plain decoding", first, of_table_1, pace,
            note="micro: all tokens over all seconds; macro: the mean over steps of a step's tokens per second",
        ),
        _filter_table(results),
        _guess_table(results),
    ]  # fmt: skip
    return [table for table in tables if table.rows]


def _filter_table(results: Results) -> Table:
    """RETRIEVAL by what its index holds."""
    names = ["retrieval-unfiltered", "retrieval", *(name for name in results if name.startswith(_OTHER))]
    # Rows of older runs do not tell of their index.
    told = {name: {**results[name], "label": results[name]["index"]} for name in names if "index" in results.get(name, {})}
    return figure_table(
        "RETRIEVAL by how its documents were kept, greedy", names, told, usual_columns(told, names),
        note="does a better filter pay? each row looks up in an index of its own, which its name tells of",
    )  # fmt: skip


def _guess_table(results: Results) -> Table:
    rows = []
    for label, drafted, accepted in _guesses(results):
        rows.append((label, str(drafted), str(accepted), f"{100 * accepted / drafted:.1f} %"))
    return Table(
        title="Figure 3: which guesses are accepted",
        columns=("where a guess comes from", "checked tokens", "accepted", "share"),
        rows=tuple(rows),
        note="the paper's plot has no numbers: forward and backward lie above retrieved",
    )


def _guesses(results: Results) -> list[tuple[str, int, int]]:
    answers = results.get("guesses", {}).get("answers", ())
    drafted = {label: sum(each["drafted_by"].get(label, 0) for each in answers) for label in LABELS}
    accepted = {label: sum(each["accepted_by"].get(label, 0) for each in answers) for label in LABELS}
    return [(label, drafted[label], accepted[label]) for label in LABELS if drafted[label]]


def _plot_guesses(axes: Axes, results: Any) -> bool:
    found = _guesses(results["units"])
    axes.bar([label for label, _, _ in found], [accepted / drafted for _, drafted, accepted in found])
    axes.set_ylabel("share of checked tokens that are accepted")
    return bool(found)


def _plot_steps(axes: Axes, results: Any) -> bool:
    units, drawn = results["units"], False
    for name in _GREEDY_TABLE_1:
        if name in units:
            axes.plot(*_cumulative([each["steps"] for each in units[name]["answers"]]), label=units[name]["label"])
            if not drawn:
                axes.plot(
                    *_cumulative([each["plain_steps"] for each in units[name]["answers"]]), label="plain", color="grey"
                )
            drawn = True
    axes.set_xlabel("step")
    axes.set_ylabel("tokens so far, all answers")
    if drawn:
        axes.legend(frameon=False)
    return drawn


def _cumulative(answers: list[list[tuple[float, int]]]) -> tuple[list[int], list[int]]:
    longest = max(map(len, answers))
    totals, so_far = [], 0
    for step in range(longest):
        so_far += sum(steps[step][1] for steps in answers if step < len(steps))
        totals.append(so_far)
    return list(range(1, longest + 1)), totals


PAPER = Paper(
    name="spectra",
    title="SPECTRA",
    about="Le et al., ACL 2025: internal and external speculation without training",
    tables=_tables,
    plots=(
        ("spectra-guesses", "Figure 3: which guesses are accepted", _plot_guesses),
        ("spectra-steps", "Figure 6: tokens against steps", _plot_steps),
    ),
)
