"""Speculative Streaming (Bhendawade et al., 2024): Table 1 with Medusa, Table 2 with a draft model, fewer streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.bench.tables import Table
from benchmarks.papers.drafter_weights import left_out, needed, parameters
from benchmarks.papers.engine import RowDrafting, with_trained
from benchmarks.papers.rows import SPEED_UP, STEP_COST, Answers, Column, DecodedRow, draw_rows, figure_table, passes
from benchmarks.papers.shared_streams import SharedStreams, TunedDecoder
from benchmarks.papers.units import Experiment, Paper, Results
from benchmarks.papers.workbench import Workbench
from services.drafter.config import StopConfig
from services.drafter.heads.streams.files import read_streams

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NODES = 31
_GAMMA = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row. ``form``: of streams; ``steps``: most of them, None: all."""

    name: str
    label: str
    source: str
    paper: str
    form: Literal["two_steps", "one_pass"] = "two_steps"
    steps: int | None = None


# OPT-1.3b on SqlContext; on DialogSum.
_TABLE_1 = (
    _Row(name="medusa", label="Medusa", source="medusa", paper="2.07x, 2.79; 1.56x, 1.91; 4.28E8"),
    _Row(name="ss", label="SS", source="streaming", paper="2.39x, 3.57; 1.94x, 2.62; 4.096E4", form="one_pass"),
    _Row(name="ss-two-steps", label="SS, drafted beside the target", source="streaming", paper="–"),
)
_TWO_MODELS = _Row(name="two-models", label="Two-model SD", source="draft_model", paper="6.59; 22.35; 269 ms")
_SS_IN_TABLE_2 = "7.79; 0; 133 ms"
# The row of a target that was tuned with its streams.
_SHARED = "ss-shared"
WITHOUT_SHARED = (
    "There is no row of the shared form, a target tuned with its streams: train one with `main_weight: 10` in a recipe of "
    "streams, and name its export with `--drafter` beside the others."
)
_ABOUT_SHARED = (
    "SS, shared (other tokens): the adapters of the last layers act on the target's own rows, too, and were trained on its "
    "text with the streams. Speed-up and call reduction are against this tuned target, whose answers the drafts do not "
    "change; `= plain` counts its answers that equal those of the target as it is. No verifier takes such streams."
)
_DEVIATIONS = (
    "The paper's figures are OPT-1.3b's on an A100: speed-up and call reduction on SqlContext, then on DialogSum, and extra "
    "parameters (Table 1); target calls, draft calls and latency on SqlContext (Table 2).",
    "The paper tunes the base model together with the streams, which changes its answers. Here the target is frozen, but "
    "for the row that says so. The "
    "parameters of our streams include their adapters; the paper's number leaves its LoRA out.",
    "The streams and heads are those that come along for the target, or that `--drafter` names; their records say how long "
    "they were trained. Those that come along have seen some 1,500 answers.",
    f"The trees are the likeliest paths of at most {_NODES} nodes; the paper prunes the product of all streams by an early "
    "exit.",
    "Metrics of the answers' quality are left out: the answers are plain decoding's, token for token.",
)


def streaming(bench: Workbench) -> Experiment:
    """The experiments. Rows of Medusa and of a draft model are left out where there are none.

    Raises:
        ConfigurationError: there are no streams for the target; says how to train them.
    """
    streams = read_streams(needed(bench, "streaming").folder, bench.config.model.path).config.num_streams
    gamma = [
        replace(_TABLE_1[2], name=f"gamma-{steps}", label=f"SS, γ = {steps}", steps=steps) for steps in range(1, streams)
    ]
    rows = [row for row in (*_TABLE_1, _TWO_MODELS, *gamma) if row.source in bench.checkpoints]
    lacking = [source for source in ("medusa", "draft_model") if source not in bench.checkpoints]
    # The target is loaded once without streams of its own, and once with them.
    rows.sort(key=lambda row: row.form == "one_pass")
    units = [_unit(bench, row) for row in rows]
    shared = bench.config.shared
    units += [] if shared is None else [_shared_unit(bench, shared)]
    notes = (*_DEVIATIONS, WITHOUT_SHARED if shared is None else _ABOUT_SHARED, *map(left_out, lacking))
    return Experiment(units=units, deviations=notes)


def _shared_unit(bench: Workbench, shared: SharedStreams) -> DecodedRow:
    @cache
    def decoder() -> TunedDecoder:
        return TunedDecoder(bench.tuned_engine(shared))

    def drafting() -> RowDrafting:
        config = with_trained(bench.tuned_engine(shared).config, num_steps=None)
        return RowDrafting(sources=("streaming",), nodes=_NODES, config=config)

    def told() -> dict[str, Any]:
        equal = decoder().equal
        return {"parameters": parameters(shared.folder), "as_the_target": f"{sum(equal)} of {len(equal)}"}

    return bench.row(
        name=_SHARED,
        label="SS, shared (other tokens)",
        paper=_TABLE_1[1].paper,
        decoder=decoder,
        drafting=drafting,
        extra=told,
    )


def _unit(bench: Workbench, row: _Row) -> DecodedRow:
    def drafting() -> RowDrafting:
        config = bench.engine(row.form).config
        if row.source == "draft_model":
            # The two-model form: a chain of fixed length.
            stop = StopConfig(policy="static", num_assistant_tokens=_GAMMA)
            config, nodes = with_trained(config, stop=stop, eagle_topk=1), _GAMMA
        else:
            config, nodes = with_trained(config, num_steps=row.steps), _NODES
        return RowDrafting(sources=(row.source,), nodes=nodes, config=config)

    return bench.row(
        name=row.name,
        label=row.label,
        paper=row.paper,
        decoder=lambda: bench.engine(row.form),
        drafting=drafting,
        extra=lambda: {"parameters": parameters(bench.checkpoints[row.source].folder)},
    )


def _tables(results: Results) -> list[Table]:
    first = [*(row.name for row in _TABLE_1), _SHARED]
    gamma = _by_streams(results)
    second = {name: dict(results[name]) for name in (_TWO_MODELS.name, "ss", _SHARED) if name in results}
    for name in {"ss", _SHARED} & second.keys():
        second[name]["paper"] = _SS_IN_TABLE_2
    own = {name: results[name] for name in first if name in results}
    tables = [
        figure_table("Table 1: speed-up, call reduction, parameters", own, own, _USUAL, _parameters(own)),
        figure_table("Table 2: calls and latency per answer", second, second, _CALLS),
        figure_table("The number of streams (γ)", gamma, results, _USUAL, "the last row has all streams of the weights"),
    ]
    return [table for table in tables if table.rows]


def _by_streams(results: Results) -> list[str]:
    """Rows by their number of streams; the last one has all."""
    return [*sorted(name for name in results if name.startswith("gamma-")), "ss-two-steps"]


def _plot_methods(axes: Axes, results: Any) -> bool:
    units = results["units"]
    rows = (*_TABLE_1, _TWO_MODELS)
    return draw_rows(axes, [(row.label, units[row.name]) for row in rows if row.name in units])


def _plot_gamma(axes: Axes, results: Any) -> bool:
    units = results["units"]
    names = [name for name in _by_streams(units) if name in units]
    labels = [f"γ = {name.removeprefix('gamma-')}" if name.startswith("gamma-") else "all streams" for name in names]
    return draw_rows(axes, [(label, units[name]) for label, name in zip(labels, names, strict=True)])


def _parameters(results: Results) -> str:
    told = (f"{result['label']} {result['parameters']:,}" for result in results.values())
    return f"extra parameters, the target's output layer not counted: {'; '.join(told)}"


def _reduction(answers: Answers) -> str:
    return f"{sum(len(each['plain_steps']) for each in answers) / max(1, passes(answers)):.2f}"


def _drafted(answers: Answers) -> str:
    # A token of the draft model is a call of it; streams need none.
    calls = sum(each["drafted_by"].get("draft_model", 0) for each in answers)
    return f"{calls / len(answers):.1f}"


_USUAL = (
    SPEED_UP,
    Column(title="call reduction", figure=_reduction),
    STEP_COST,
)
_CALLS = (
    Column(title="target calls", figure=lambda answers: f"{passes(answers) / len(answers):.1f}"),
    Column(title="draft calls", figure=_drafted),
    Column(title="ms", figure=lambda answers: f"{1e3 * sum(each['seconds'] for each in answers) / len(answers):.0f}"),
)

PAPER = Paper(
    name="streaming",
    title="Speculative Streaming",
    about="Bhendawade et al., 2024: the target's last layers guess further tokens in the pass that checks the last ones",
    tables=_tables,
    plots=(
        ("streaming-methods", "Tables 1 and 2: tokens per pass and speed-up", _plot_methods),
        ("streaming-gamma", "The number of streams (γ)", _plot_gamma),
    ),
)
