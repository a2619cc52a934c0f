"""What ``outrider bench sizes`` says: tables, a JSON object, and the plot of speed-ups by the target's size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench.plots import Plots, draw
from benchmarks.bench.report import write_pages
from benchmarks.bench.tables import Table, number
from benchmarks.sizes.arithmetic import DraftedRow, SizeCosts, best, payoff
from benchmarks.sizes.run import MeasuredSizes
from benchmarks.sizes.stack import LAYERS, ROWS
from speculation.colours import colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = "results.json"
TITLE = "outrider bench sizes"
ASSUMED = (
    "tau is the default model's, and is assumed for other sizes: larger models say other things, and a drafter trained for "
    "one guesses them better or worse. Costs are measured at every size"
)
_HOW = (
    f"larger targets: {LAYERS} layers of their shapes with random bfloat16 weights, and one, for passes of "
    f"{ROWS[0]} to {ROWS[-1]} rows; what a layer takes, times their number, and the output layer. Heads: their own shapes "
    "at the target's width, random weights, stored as the head's own are. A draft model stays as it is, since it reads "
    "nothing of the target. In brackets: the most nodes of a tree with which it is fastest"
)
WORDS = {
    "tau": "tokens per pass behind an answer's first token, with trees of so many nodes, every draft waited for",
    "draft": "a step's drafts: the drafter's, and where n-grams draft too, theirs",
    "speed-up": "tau * (plain pass + rest) / (draft + pass over the tree's rows + rest); rest: what a step takes besides",
    "measured": "end to end: tokens per pass over the median seconds of a step, over plain decoding's by turns; an "
    "answer's first step left out, which waits for the prompt's reading",
    "n-grams": "suffix and recycling, one tree: blend without a model",
    "from": "the smallest size at which it pays, as it does at every larger one that was measured",
}


def tables_of(found: MeasuredSizes) -> list[Table]:
    """The default model, all sizes, and from where on each pays."""
    return [_default(found), _sizes(found), _payoffs(found)]


def _default(found: MeasuredSizes) -> Table:
    first = found.sizes[0]
    step = f"a plain step: {1e3 * first.plain_s:.1f} ms, of which its pass {1e3 * first.curve.at(1):.1f}"
    rows = [
        (
            row.name,
            str(row.budget),
            number(row.nodes),
            number(row.tau, ".2f"),
            number(1e3 * first.draft_s(row), ".2f"),
            f"{first.draft_s(row) / first.plain_s:.2f}",
            number(1e3 * first.curve.at(1 + row.nodes)),
            f"{first.speed_up(row):.2f}x",
            "–" if row.measured is None else f"{row.measured:.2f}x",
        )
        for row in found.rows
    ]
    return Table(
        title=f"The default model, {first.size} billion: tokens per pass, cost, end to end",
        columns=(
            "drafts by", "most nodes", "nodes", "tau", "draft ms", "of a plain step", "its pass ms", "speed-up", "measured",
        ),
        rows=tuple(rows),
        note=f"{step}; {_control(found)}",
    )  # fmt: skip


def _control(found: MeasuredSizes) -> str:
    """How what is measured by layers compares with the whole."""
    control, first = found.control, found.sizes[0]
    passes = f"{1e3 * control.curve.at(1):.1f} ms for 1 row, {1e3 * control.curve.at(16):.1f} for 16"
    own = f"{1e3 * first.curve.at(1):.1f} and {1e3 * first.curve.at(16):.1f}"
    return f"of this shape by layers, in bfloat16: {passes} (the model as it is stored: {own})"


def _sizes(found: MeasuredSizes) -> Table:
    passes = [("a plain step, ms", *(number(1e3 * costs.plain_s) for costs in found.sizes))]
    many = [
        ("16 rows over 1", *(f"{costs.curve.at(16) / costs.curve.at(1):.2f}" for costs in found.sizes)),
    ]
    kinds = dict.fromkeys((row.drafter, row.beside) for row in found.rows)
    drafts = [
        (
            f"draft of {name}, of a step",
            *(f"{costs.drafts_s[name][budget] / costs.plain_s:.2f}" for costs in found.sizes),
        )
        for name in found.drafters
        for budget in [max(row.budget for row in found.rows)]
    ]
    gains = [
        (_name(found.rows, drafter, beside), *(_cell(costs, found.rows, drafter, beside) for costs in found.sizes))
        for drafter, beside in kinds
    ]
    return Table(
        title="Speed-up over plain decoding by the target's size",
        columns=("billions of parameters", *(costs.size for costs in found.sizes)),
        rows=(*passes, *many, *drafts, *gains),
        note=f"{ASSUMED}; {_HOW}",
    )


def _name(rows: Sequence[DraftedRow], drafter: str, beside: bool) -> str:
    return next(row.name for row in rows if (row.drafter, row.beside) == (drafter, beside))


def _cell(costs: SizeCosts, rows: Sequence[DraftedRow], drafter: str, beside: bool) -> str:
    row = best(costs, rows, drafter, beside=beside)
    return f"{costs.speed_up(row):.2f}x ({row.budget})"


def _payoffs(found: MeasuredSizes) -> Table:
    none = f"none up to {found.sizes[-1].size}"
    every = [payoff(name, found.sizes, found.rows) for name in found.drafters]
    return Table(
        title="From which size on it pays, billions of parameters",
        columns=("drafter", "alone, over plain decoding", "alone, over n-grams", "beside n-grams, over n-grams alone"),
        rows=tuple(
            (each.drafter, each.over_plain or none, each.over_ngrams or none, each.beside_ngrams or none) for each in every
        ),
        note=f"{ASSUMED}; one request at a time, drafter and target on the same cores, one after the other",
    )


def as_object(found: MeasuredSizes, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for programs; ``about``: settings and machine."""
    return {
        **about,
        "assumed": ASSUMED,
        "rows": [asdict(row) | {"name": row.name} for row in found.rows],
        "sizes": [_size_object(costs, found) for costs in found.sizes],
        "control": _size_object(found.control, found),
        "payoffs": [asdict(payoff(name, found.sizes, found.rows)) for name in found.drafters],
        "changed": list(found.changed),
    }


def _size_object(costs: SizeCosts, found: MeasuredSizes) -> dict[str, Any]:
    return {
        "size": costs.size,
        "parameters": found.numbers[costs.size],
        "pass_s": dict(costs.curve.seconds),
        "rest_s": costs.rest_s,
        "plain_s": costs.plain_s,
        "drafts_s": {name: dict(by_budget) for name, by_budget in costs.drafts_s.items()},
        "speed_ups": [
            {"drafter": row.drafter, "beside": row.beside, "name": row.name, "budget": row.budget, "is": costs.speed_up(row)}
            for drafter, beside in dict.fromkeys((each.drafter, each.beside) for each in found.rows)
            for row in [best(costs, found.rows, drafter, beside=beside)]
        ],
    }


def write_sizes_report(found: MeasuredSizes, about: Mapping[str, Any], folder: Path) -> None:
    """Write ``results.json``, ``report.html``, ``report.md`` and ``plots/``.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    results = as_object(found, about)
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    machine = results["environment"]
    facts = [
        ("command", str(results["command"])),
        ("machine", f"{machine['processor']}, {machine['cores']} cores"),
        ("assumed", ASSUMED),
    ]
    write_pages(folder, TITLE, facts, tables_of(found), draw(results, folder / "plots", PLOTS), WORDS)


def _by_size(axes: Axes, results: Mapping[str, Any]) -> bool:
    sizes = results["sizes"]
    at = [size["parameters"] / 1e9 for size in sizes]
    drafters = list(dict.fromkeys(first["drafter"] for first in sizes[0]["speed_ups"]))
    for place, first in enumerate(sizes[0]["speed_ups"]):
        gains = [size["speed_ups"][place]["is"] for size in sizes]
        colour = colour_of(first["drafter"] or "blend")
        style = "--" if first["beside"] else "-"
        # Colours of drafters of one kind are alike.
        marker = _MARKERS[drafters.index(first["drafter"]) % len(_MARKERS)]
        axes.plot(at, gains, style, marker=marker, markersize=5, label=first["name"], color=colour)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(at, [size["size"] for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("the target's parameters, billions (tau of the default model is assumed)")
    axes.set_ylabel("speed / plain decoding")
    axes.figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return True


_MARKERS = "osD^v*PX"
PLOTS: Plots = (("sizes", "Which drafter pays for which target", _by_size),)
