"""FSPAD's Table 3 and Figure 3: what the feature sampler and partial alignment bring, of training runs with and without."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.bench.tables import Table
from benchmarks.papers.drafter_weights import parameters
from benchmarks.papers.engine import RowDrafting, with_trained
from benchmarks.papers.rows import Answers, DecodedRow, draw_curves, same, speed_up, step_cost, tau
from benchmarks.papers.trained_runs import TrainedRun
from benchmarks.papers.units import Results
from benchmarks.papers.workbench import Workbench
from services.drafter.heads.files.kinds import inspect

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row. ``recipe`` makes its heads; ``greedy``, ``sampled``: Vicuna 7B's figures."""

    label: str
    recipe: str
    greedy: str
    sampled: str


# By ``TrainedRun.row``, as the paper orders them.
_ROWS = {
    (False, False): _Row(
        label="w/o both",
        recipe="eagle_matched",
        greedy="4.74, 3.56x; 4.27, 2.99x; 5.03, 3.69x",
        sampled="4.20, 3.15x; 4.01, 2.80x; 4.65, 3.41x",
    ),
    (False, True): _Row(
        label="w/o FS",
        recipe="fspad_alignment_only",
        greedy="4.88, 3.65x; 4.30, 3.01x; 5.04, 3.69x",
        sampled="4.32, 3.24x; 4.06, 2.83x; 4.77, 3.49x",
    ),
    (True, False): _Row(
        label="w/o PAD",
        recipe="fspad_sampler_only",
        greedy="5.10, 3.69x; 4.56, 3.19x; 5.21, 3.74x",
        sampled="4.44, 3.20x; 4.18, 2.91x; 4.89, 3.50x",
    ),
    (True, True): _Row(
        label="FSPAD",
        recipe="fspad",
        greedy="5.12, 3.71x; 4.60, 3.22x; 5.32, 3.82x",
        sampled="4.51, 3.26x; 4.24, 2.96x; 4.95, 3.55x",
    ),
}
_KEY = "ablation"
WITHOUT_RUNS = (
    "Table 3 and the curves of its rows (Figure 3) are made of training runs: name those of the recipes "
    f"{', '.join(row.recipe for row in _ROWS.values())}, one for each seed, with `--ablation RUN`."
)


def ablation_rows(bench: Workbench, nodes: int, tree: Mapping[str, Any]) -> list[DecodedRow]:
    """A row for each run of ``bench.config.ablation``, greedily and at temperature 1.

    Args:
        tree: fields of ``TrainedConfig``.
    """
    return [_decoded(bench, run, nodes, tree, temperature) for temperature in (0.0, 1.0) for run in bench.config.ablation]


def _decoded(bench: Workbench, run: TrainedRun, nodes: int, tree: Mapping[str, Any], temperature: float) -> DecodedRow:
    row = _ROWS[run.row]

    def drafting() -> RowDrafting:
        folder = run.head()
        source = inspect(folder, bench.config.model.path).source
        config = with_trained(bench.engine().config, checkpoints={source: folder}, **tree)
        return RowDrafting(sources=(source,), nodes=nodes, config=config)

    def told() -> dict[str, Any]:
        record = {
            "row": list(run.row),
            "held_out": run.held_out,
            "accepted": run.accepted,
            "parameters": parameters(run.head()),
        }
        return {_KEY: record, "losses": run.losses, "acceptance": run.acceptance}

    return bench.row(
        name=f"{_KEY}-{run.name}{'-sampled' if temperature else ''}",
        label=row.label,
        paper=row.sampled if temperature else row.greedy,
        drafting=drafting,
        temperature=temperature,
        extra=told,
    )


def ablation_notes(runs: Sequence[TrainedRun]) -> list[str]:
    """What the page says of the runs: how much they have seen, and which rows have none."""
    if not runs:
        return [WITHOUT_RUNS]
    first, seeds = runs[0], sorted({run.recipe["seed"] for run in runs})
    counts = [run.predictions for run in runs]
    learnt = " to ".join(f"{each:,}" for each in sorted({min(counts), max(counts)}))
    notes = [
        f"Table 3's heads were trained here, for {first.recipe['steps']:,} steps of {first.recipe['batch_rows']:,} "
        f"positions on {first.answers:,} answers of {first.tokens:,} tokens ({learnt} predictions); "
        f"seeds {', '.join(map(str, seeds))}. That is far less than the 68,000 conversations of the paper's.",
        "Table 3 has means of the runs, and ± their standard deviation over seeds. `held out` is a chain's tokens per pass "
        "on text that no run learnt from, and `1st draft` how often the first draft is accepted there (`outrider train "
        "evaluate` measures it). The paper's figures are τ and speed-up on MT-bench, CNN/DM and GSM8K.",
        f"The token loss of Figure 3 is the recipes' divergence, {first.recipe['divergence']}; the paper's is a soft "
        "cross-entropy that weighs 0.1 or 0.02. Its accuracy is here the chance that the first draft is accepted.",
    ]
    lacking = [row.recipe for form, row in _ROWS.items() if form not in {run.row for run in runs}]
    return notes + [f"Table 3 has no row of {recipe}: no run of it was named." for recipe in lacking]


def ablation_tables(results: Results) -> list[Table]:
    """Table 3, greedy and at temperature 1."""
    return [
        _table("Table 3: the parts one by one, greedy", results, sampled=False),
        _table("Table 3: the parts one by one, temperature 1", results, sampled=True),
    ]


def _table(title: str, results: Results, *, sampled: bool) -> Table:
    rows = []
    for runs in _by_row(results, sampled=sampled):
        answers = [each for run in runs for each in run["answers"]]
        tasks = list(dict.fromkeys(each["task"] for each in answers))
        rows.append(
            (
                runs[0]["label"],
                f"{len(runs)}",
                _over_runs(runs, speed_up, unit="x"),
                _over_runs(runs, tau),
                _over_runs(runs, step_cost, ".1f"),
                *(_over_runs(runs, tau, task=task) for task in tasks if len(tasks) > 1),
                _mean([run[_KEY]["held_out"] for run in runs], ".3f"),
                _mean([run[_KEY]["accepted"] for run in runs], ".3f"),
                f"{runs[0][_KEY]['parameters']:,}",
                same(answers),
                runs[0]["paper"],
            )
        )
        columns = ("method", "runs", "speed-up", "τ", "a step costs", *(f"τ, {task}" for task in tasks if len(tasks) > 1))
    if not rows:
        return Table(title=title, columns=(), rows=())
    columns += ("held out", "1st draft", "parameters", "= plain", "in the paper")
    return Table(title=title, columns=columns, rows=tuple(rows))


def _by_row(results: Results, *, sampled: bool) -> Iterator[list[Mapping[str, Any]]]:
    """The results of runs, those of a row together."""
    for form in _ROWS:
        found = [
            result
            for name, result in results.items()
            if _KEY in result and tuple(result[_KEY]["row"]) == form and name.endswith("-sampled") == sampled
        ]
        if found:
            yield found


def _over_runs(
    runs: Sequence[Mapping[str, Any]],
    figure: Callable[[Answers], float],
    form: str = ".2f",
    unit: str = "",
    task: str | None = None,
) -> str:
    return _mean([figure([each for each in run["answers"] if task in (None, each["task"])]) for run in runs], form, unit)


def _mean(values: Sequence[float | None], form: str, unit: str = "") -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "–"
    spread = f" ± {statistics.stdev(known):{form}}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):{form}}{unit}{spread}"


def plot_losses(axes: Axes, results: Any) -> bool:
    """Both losses of every run by step."""
    return draw_curves(axes, _curves(results, "losses"), "loss, mean over predictions")


def plot_acceptance(axes: Axes, results: Any) -> bool:
    """The chance that the first draft is accepted, of every run by step."""
    drawn = draw_curves(axes, _curves(results, "acceptance"), "accepted first drafts, while learning")
    axes.set_yscale("linear")
    return drawn


def _curves(results: Any, what: str) -> list[tuple[str, Mapping[str, Sequence[float]]]]:
    rows = _by_row(results["units"], sampled=False)
    return [(run["label"], run[what]) for runs in rows for run in runs if run.get(what)]
