"""FSPAD (Gui et al., 2024): Table 1, Table 2, which halves the tree, and, of training runs, Table 3 and Figure 3."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.bench.tables import Table
from benchmarks.papers.ablation import ablation_notes, ablation_rows, ablation_tables, plot_acceptance, plot_losses
from benchmarks.papers.drafter_weights import left_out, needed
from benchmarks.papers.engine import RowDrafting, with_trained
from benchmarks.papers.rows import DecodedRow, draw_curves, draw_rows, figure_table, training_losses, usual_columns
from benchmarks.papers.units import Experiment, Paper, Results
from benchmarks.papers.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT = ("prompt_lookup", "lookahead")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row. ``tree``: fields of ``TrainedConfig``."""

    name: str
    label: str
    source: str
    nodes: int
    paper: str = "–"
    tree: dict[str, Any]


# EAGLE-2's tree of the paper: 59 nodes behind the last token, five levels after the first, ten branches; and half of it.
_WHOLE = {"num_draft_tokens": 60, "num_steps": 6, "eagle_topk": 10}
_HALF = {"num_draft_tokens": 30, "num_steps": 6, "eagle_topk": 5}
# Vicuna 7B: tau and speed-up on MT-bench; on GSM8K (Table 1) or CNN/DM (Table 2).
_ROWS = (
    _Row(name="pld", label="PLD", source="prompt_lookup", nodes=10, tree={}, paper="1.63, 1.60x; 1.81, 1.69x"),
    _Row(name="lookahead", label="Lookahead", source="lookahead", nodes=120, tree={}, paper="2.20, 1.68x; 2.78, 1.97x"),
    _Row(name="medusa", label="Medusa", source="medusa", nodes=63, tree={}, paper="2.42, 2.36x; 2.50, 2.42x"),
    _Row(name="eagle", label="EAGLE-2", source="eagle", nodes=59, tree=_WHOLE, paper="4.74, 3.56x; 5.03, 3.69x"),
    _Row(name="eagle-best-first", label="EAGLE-2, best-first tree", source="eagle", nodes=59, tree={}),
    _Row(name="eagle3", label="EAGLE-3", source="eagle3", nodes=59, tree=_WHOLE),
    _Row(name="eagle3-best-first", label="EAGLE-3, best-first tree", source="eagle3", nodes=59, tree={}),
    _Row(name="fspad", label="FSPAD", source="fspad", nodes=59, tree=_WHOLE, paper="5.12, 3.71x; 5.32, 3.82x"),
    _Row(name="fspad-best-first", label="FSPAD, best-first tree", source="fspad", nodes=59, tree={}),
)
_SAMPLED = {
    "eagle": "4.20, 3.15x; 4.65, 3.41x",
    "eagle-best-first": "–",
    "eagle3": "–",
    "eagle3-best-first": "–",
    "fspad": "4.51, 3.26x; 4.95, 3.55x",
    "fspad-best-first": "–",
}
_HALVED = (
    _Row(name="eagle-half", label="EAGLE-2", source="eagle", nodes=29, tree=_HALF, paper="4.22, 3.44x; 3.87, 3.21x"),
    _Row(name="eagle-best-first-half", label="EAGLE-2, best-first tree", source="eagle", nodes=29, tree={}),
    _Row(name="eagle3-half", label="EAGLE-3", source="eagle3", nodes=29, tree=_HALF),
    _Row(name="eagle3-best-first-half", label="EAGLE-3, best-first tree", source="eagle3", nodes=29, tree={}),
    _Row(name="fspad-half", label="FSPAD", source="fspad", nodes=29, tree=_HALF, paper="4.51, 3.61x; 4.14, 3.39x"),
    _Row(name="fspad-best-first-half", label="FSPAD, best-first tree", source="fspad", nodes=29, tree={}),
)
_DEVIATIONS = (
    "The paper's figures are Vicuna 7B's on an A100: τ and speed-up on MT-bench, then on GSM8K (Table 1) or CNN/DM (Table "
    "2).",
    "The heads are those that come along for the target, or that `--drafter` names; their records say how long they "
    "were trained. The paper's saw 68,000 conversations.",
    "At temperature 1 drafts are made with the request's noise and checked by the walk; the paper's are made without.",
    "The best-first tree always runs the likeliest node that is open; EAGLE-2's runs the best ten of every level.",
    "EAGLE-3 is later than the paper; it stands beside EAGLE-2 where there are weights of it, with the same trees.",
    "The losses of Table 1's heads are drawn where their record has them: `outrider train run` logs them, and "
    "`outrider train export` writes them into training.json.",
)


def fspad(bench: Workbench) -> Experiment:
    """The experiments. Rows whose weights are not there are left out.

    Raises:
        ConfigurationError: there is no FSPAD head for the target; says how to train one.
    """
    needed(bench, "fspad")
    rows = [row for row in (*_ROWS, *_HALVED) if row.source in (*_TEXT, *bench.checkpoints)]
    sampled = [replace(row, name=f"{row.name}-sampled", paper=_SAMPLED[row.name]) for row in rows if row.name in _SAMPLED]
    units = [*(_unit(bench, row) for row in rows), *(_unit(bench, row, 1.0) for row in sampled)]
    units += ablation_rows(bench, 59, _WHOLE)
    lacking = [source for source in ("eagle", "medusa") if source not in bench.checkpoints]
    notes = (*_DEVIATIONS, *ablation_notes(bench.config.ablation), *map(left_out, lacking))
    return Experiment(units=units, deviations=notes)


def _unit(bench: Workbench, row: _Row, temperature: float = 0.0) -> DecodedRow:
    def drafting() -> RowDrafting:
        return RowDrafting(sources=(row.source,), nodes=row.nodes, config=with_trained(bench.engine().config, **row.tree))

    return bench.row(
        name=row.name,
        label=row.label,
        paper=row.paper,
        drafting=drafting,
        temperature=temperature,
        extra=lambda: training_losses(bench.checkpoints[row.source].folder) if row.source in bench.checkpoints else {},
    )


def _tables(results: Results) -> list[Table]:
    titles = (
        ("Table 1, greedy", [row.name for row in _ROWS]),
        ("Table 1, temperature 1", [f"{name}-sampled" for name in _SAMPLED]),
        ("Table 2: half the tree, greedy", [row.name for row in _HALVED]),
    )
    tables = [figure_table(title, names, results, usual_columns(results, names)) for title, names in titles]
    return [table for table in (*tables, *ablation_tables(results)) if table.rows]


def _plot_rows(axes: Axes, results: Any) -> bool:
    units = results["units"]
    return draw_rows(axes, [(units[row.name]["label"], units[row.name]) for row in _ROWS if row.name in units])


def _plot_losses(axes: Axes, results: Any) -> bool:
    units = results["units"]
    heads = [units[name] for name in ("fspad", "eagle", "eagle3") if "losses" in units.get(name, {})]
    return draw_curves(axes, [(head["label"], head["losses"]) for head in heads], "loss, mean over predictions")


PAPER = Paper(
    name="fspad",
    title="FSPAD on EAGLE-2",
    about="Gui et al., 2024: feature sampling and partial alignment distillation",
    tables=_tables,
    plots=(
        ("fspad-methods", "Table 1, greedy: tokens per pass and speed-up", _plot_rows),
        ("fspad-losses", "The losses of Table 1's heads by step", _plot_losses),
        ("fspad-ablation-losses", "Figure 3: both losses of Table 3's rows by step", plot_losses),
        ("fspad-ablation-acceptance", "Figure 3: accuracy of Table 3's rows by step", plot_acceptance),
    ),
)
