"""Shows a verdict: tables with the worst cell first, plots, and pages with both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench.plots import draw
from benchmarks.bench.report import write_pages
from benchmarks.bench.tables import Table, number
from benchmarks.never_slower.kinds import KINDS, PLAIN_KINDS
from benchmarks.never_slower.verdict import (
    FORMULAS,
    GOAL,
    GOAL_AT_ONCE,
    LEAST,
    LEAST_SECOND,
    CellVerdict,
    NeverSlowerVerdict,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
# Wrong tokens that are shown; results.json has all.
_WRONG_SHOWN = 20


def write_report(record: Record, verdict: NeverSlowerVerdict, folder: Path) -> None:
    """Write ``report.html``, ``report.md`` and ``plots/``.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    strategies = record["settings"]["strategies"]
    plots = tuple(
        (f"never_slower_{name}", f"{name} / plain decoding, by requests at once", partial(_ratios, verdict, name))
        for name in strategies
    )
    drawn = draw(record, folder / "plots", plots)
    said = verdict_line(verdict)
    write_pages(folder, _title(record, verdict), _facts(record), all_tables(record, verdict), drawn, FORMULAS, verdict=said)


def all_tables(record: Record, verdict: NeverSlowerVerdict) -> list[Table]:
    """All tables that are not empty."""
    tables = [_cells(verdict), _by_load(verdict), _by_kind(verdict), _wrong(verdict), _left_out(record)]
    return [table for table in tables if table.rows]


def verdict_line(verdict: NeverSlowerVerdict) -> str:
    """The verdict in one sentence, and the goal in another."""
    count = len(verdict.cells)
    bad = sum(cell.bad for cell in verdict.cells)
    unclear = sum(cell.state.startswith("unclear") for cell in verdict.cells)
    said = {
        "yes": f"yes: no cell of {count} is slower than plain decoding",
        "no": f"NO: {bad} of {count} cells are slower than plain decoding, have a slow second, a wrong token, or failed",
        "unclear": f"unclear: {unclear} of {count} cells cannot be told" if count else "unclear: nothing was measured",
    }[verdict.word]
    reached = [
        f"{name} {mean:.2f} ({'reached' if mean >= GOAL else 'not reached'})"
        for name, mean in verdict.means.items()
        if not math.isnan(mean)
    ]
    goal = f"Mean at up to {GOAL_AT_ONCE} at once (goal {GOAL}): {', '.join(reached)}." if reached else ""
    return f"Never slower: {said}. {goal}".strip()


def _title(record: Record, verdict: NeverSlowerVerdict) -> str:
    partial_run = " (partial: interrupted)" if record["partial"] else ""
    return f"outrider bench never-slower: {record['settings']['model']}: {verdict.word}{partial_run}"


def _facts(record: Record) -> list[tuple[str, str]]:
    environment, settings = record["environment"], record["settings"]
    memory, gpus = environment["memory_bytes"] / 2**30, ", ".join(environment["gpus"]) or "no GPU"
    return [
        ("command", settings["command"]),
        ("prompts", _prompts(settings)),
        ("memory", "a server forgets all requests before every round, so no prompt is known from an earlier one; within a "
         "round no prompt comes twice; repeats begin at other prompts"),
        ("answers", f"up to {settings['max_tokens']} tokens, seed {settings['seed']}, each compared with plain decoding's; "
         + ("equal tokens are promised" if record["exact"] else "equal tokens are NOT promised here")),
        ("turns", f"{settings['seconds']:g} seconds each, {settings['repeats']} repeats; plain decoding first and last; "
         "in process a second at a time, each contestant with a service of its own"),
        ("model", f"{settings['model']}, {settings['dtype']}"),
        ("machine", f"{environment['processor']}, {environment['cores']} cores, {memory:.0f} GiB, {gpus}"),
        ("threads", str(environment["threads"])),
        ("system", f"{environment['system']}, Python {environment['python']}"),
        ("version", f"Outrider {environment['outrider']}, commit {environment['commit'] or 'unknown'}"),
        ("measured", f"{record['started']}, {record['duration_s'] / 60:.1f} minutes"),
    ]  # fmt: skip


def _prompts(settings: Mapping[str, Any]) -> str:
    own = ", ".join(f"{count} {kind}" for kind, count in settings["prompt_counts"].items() if count)
    return f"{settings['prompts']}: {own}; then built-in ones" if own else "built-in ones"


def _cells(verdict: NeverSlowerVerdict) -> Table:
    rows = tuple(
        (
            f"{cell.strategy}, {cell.cell}",
            cell.state,
            f"{number(cell.ratio, '.3f')} ± {number(cell.noise, '.3f')}",
            " ".join(f"{ratio:.2f}" for ratio in cell.ratios) or "–",
            number(cell.plain_speed),
            f"{number(cell.slowest_second, '.2f')} / {number(cell.plain_slowest_second, '.2f')}",
            number(cell.second_bound, ".2f"),
            number(cell.ttft_ratio, ".2f"),
            str(cell.answers),
        )
        for cell in verdict.cells
    )
    return Table(
        title="Every cell, the worst first",
        columns=(
            "cell", "never slower", "ratio", "repeats", "plain tok/s", "slowest second / plain's", "bound", "TTFT",
            "answers",
        ),
        rows=rows,
        note=f"NO: ratio + noise below {LEAST}, or a second below {LEAST_SECOND} and below plain decoding's own slowest; "
        "bound –: seconds are not judged here",
    )  # fmt: skip


def _by_load(verdict: NeverSlowerVerdict) -> Table:
    return _means("Mean ratio by requests at once", "at once", verdict, lambda cell: cell.cell.at_once)


def _by_kind(verdict: NeverSlowerVerdict) -> Table:
    return _means("Mean ratio by kind of prompt", "kind", verdict, lambda cell: KINDS.index(cell.cell.kind), KINDS)


def _means(title: str, column: str, verdict: NeverSlowerVerdict, key: Any, names: tuple[str, ...] = ()) -> Table:
    strategies = list(verdict.means)
    groups: dict[int, dict[str, list[float]]] = {}
    for cell in verdict.cells:
        if not math.isnan(cell.ratio):
            groups.setdefault(key(cell), {}).setdefault(cell.strategy, []).append(cell.ratio)
    rows = tuple(
        (names[group] if names else str(group), *(_mean(several.get(name, [])) for name in strategies))
        for group, several in sorted(groups.items())
    )
    return Table(title=title, columns=(column, *strategies), rows=rows)


def _mean(ratios: list[float]) -> str:
    return f"{sum(ratios) / len(ratios):.3f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else "–"


def _wrong(verdict: NeverSlowerVerdict) -> Table:
    # A wrong token of plain decoding stands in every strategy's verdict.
    said = list(dict.fromkeys((str(cell.cell), text) for cell in verdict.cells for text in cell.wrong))
    note = f"{len(said) - _WRONG_SHOWN} more are in results.json" if len(said) > _WRONG_SHOWN else ""
    return Table(title="Answers that differ", columns=("cell", "where"), rows=tuple(said[:_WRONG_SHOWN]), note=note)


def _left_out(record: Record) -> Table:
    return Table(title="Left out", columns=("cell", "why"), rows=tuple(record["left_out"].items()))


def _ratios(verdict: NeverSlowerVerdict, strategy: str, axes: Axes, _: Record) -> bool:
    """A dot for every cell, by load; a line for every kind's mean."""
    own = [cell for cell in verdict.cells if cell.strategy == strategy and not math.isnan(cell.ratio)]
    levels = sorted({cell.cell.at_once for cell in own})
    for kind in (*PLAIN_KINDS, *KINDS[len(PLAIN_KINDS) :]):
        by_level: dict[int, list[CellVerdict]] = {}
        for cell in own:
            if cell.cell.kind == kind:
                by_level.setdefault(cell.cell.at_once, []).append(cell)
        if not by_level:
            continue
        at = sorted(by_level)
        means = [sum(cell.ratio for cell in by_level[level]) / len(by_level[level]) for level in at]
        noise = [max(0.0 if math.isnan(cell.noise) else cell.noise for cell in by_level[level]) for level in at]
        line = axes.errorbar(at, means, yerr=noise, marker="o", markersize=4, capsize=2, label=kind)
        spots = [(level, cell.ratio) for level in at for cell in by_level[level]]
        axes.scatter([level for level, _ in spots], [ratio for _, ratio in spots], s=6, color=line[0].get_color(), alpha=0.5)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhline(LEAST, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second / plain")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return bool(own)
