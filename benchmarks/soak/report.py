"""Shows a soak: tables, plots over time, and pages with both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench.plots import draw
from benchmarks.bench.report import write_pages
from benchmarks.bench.results import RESULTS, write_results
from benchmarks.bench.tables import Table, number
from benchmarks.soak.doors import DOORS
from benchmarks.soak.faults import OF_NETWORKS
from benchmarks.soak.resources import Trend, Usage
from benchmarks.soak.verdict import FORMULAS, SoakVerdict, latencies_by_tenant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.soak.run import SoakRecord

_SHOWN = 20
_KINDS = ("killed", "stopped", *OF_NETWORKS)


def write_report(record: SoakRecord, verdict: SoakVerdict, folder: Path) -> None:
    """Write ``results.json``, ``report.html``, ``report.md`` and ``plots/``.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    results = _results(record, verdict)
    write_results(folder / RESULTS, results)
    plots = draw(results, folder / "plots", _PLOTS)
    title = f"outrider bench soak: {record.about['model']}" + (" (partial: interrupted)" if record.partial else "")
    write_pages(folder, title, _facts(record), all_tables(record, verdict), plots, FORMULAS, verdict=verdict.line)


def all_tables(record: SoakRecord, verdict: SoakVerdict) -> list[Table]:
    """All tables that are not empty."""
    tables = [_answers(record), _latencies(record), _errors(record), _faults(record), _resources(verdict), _broken(verdict)]
    return [table for table in tables if table.rows]


def _results(record: SoakRecord, verdict: SoakVerdict) -> dict[str, Any]:
    return {
        **record.about,
        "partial": record.partial,
        "verdict": {"good": verdict.good, "said": verdict.line, "answers": verdict.answers}
        | {name: getattr(verdict, name) for name in ("right", "left", "errors", "wrong", "held", "leaks", "ended")},
        "latencies_s": latencies_by_tenant(record.judged),
        "error_kinds": dict(Counter(each.error for each in record.judged if each.error)),
        "trends": [each.as_object() for each in verdict.trends],
        "faults": [asdict(each) for each in record.faults],
        "usage": [asdict(each) for each in record.usage],
        "first_tokens_s": [
            (each.began_s - record.began_s, each.first_s) for each in record.judged if each.first_s is not None
        ],
    }


def _facts(record: SoakRecord) -> list[tuple[str, str]]:
    about, environment = record.about, record.about["environment"]
    memory = environment["memory_bytes"] / 2**30
    return [
        ("command", about["command"]),
        ("service", f"{about['replicas']}; each component in a process of its own, with relays between them"),
        ("users", f"{about['users']} at once, of {len(about['tenants'])} tenants; seed {about['seed']}"),
        ("machine", f"{environment['processor']}, {environment['cores']} cores, {memory:.0f} GiB"),
        ("system", f"{environment['system']}, Python {environment['python']}"),
        ("version", f"Outrider {environment['outrider']}, commit {environment['commit'] or 'unknown'}"),
        ("measured", f"{about['started']}, {about['seconds'] / 60:.1f} minutes"),
    ]


def _answers(record: SoakRecord) -> Table:
    rows = []
    for what, names in (("door", DOORS), ("tenant", _tenants(record)), ("strategy", record.about["strategies"])):
        for name in names:
            counts = Counter(each.outcome for each in record.judged if getattr(each, what) == name)
            broken = f"NO: {counts['broken']}" if counts["broken"] else "0"
            rows.append((name, str(counts["right"]), str(counts["error"]), str(counts["left"]), broken))
    return Table(
        title="Answers, by door, tenant and strategy",
        columns=("", "right", "one explicit error", "left by the user", "anything else"),
        rows=tuple(rows),
    )


def _tenants(record: SoakRecord) -> list[str]:
    names: list[str] = record.about["tenants"]
    return names


def _latencies(record: SoakRecord) -> Table:
    rows = tuple(
        (
            f"{tenant}, {name}",
            str(values["count"]),
            *(number(1e3 * values[share], ".0f") for share in ("p50", "p95", "p99", "p100")),
        )
        for tenant, measures in latencies_by_tenant(record.judged).items()
        for name, values in measures.items()
    )
    return Table(
        title="Latency by tenant, in milliseconds, faults included",
        columns=("", "answers", "p50", "p95", "p99", "longest"),
        rows=rows,
    )


def _errors(record: SoakRecord) -> Table:
    counts = Counter((each.error, each.door) for each in record.judged if each.error)
    kinds = sorted({kind for kind, _ in counts})
    rows = tuple((kind, *(str(counts[kind, door]) for door in DOORS)) for kind in kinds)
    return Table(title="Explicit errors, by door", columns=("error", *DOORS), rows=rows)


def _faults(record: SoakRecord) -> Table:
    counts = Counter((fault.component, fault.kind) for fault in record.faults)
    components = sorted({component for component, _ in counts})
    rows = tuple((name, *(str(counts[name, kind]) for kind in _KINDS)) for name in components)
    return Table(title="Faults", columns=("component", *_KINDS), rows=rows)


def _resources(verdict: SoakVerdict) -> Table:
    rows = tuple(
        (
            f"{each.process}, {each.measure}",
            f"{each.first:.0f}",
            f"{each.last:.0f}",
            f"{each.slope:+.1f}",
            f"{each.low:+.1f} to {each.high:+.1f}",
            f"{each.seconds:.0f}",
            _flat(each, verdict),
        )
        for each in verdict.trends
    )
    return Table(
        title="Memory (MiB) and open descriptors of every process",
        columns=("process", "first", "last", "slope an hour", "99 % interval", "seconds", "flat"),
        rows=rows,
    )


def _flat(trend: Trend, verdict: SoakVerdict) -> str:
    if trend.measure == "memory":
        return "NO: grows" if trend.leaks else "yes"
    before, after = verdict.files.get(trend.process, (0, 0))
    return f"{before} before, {after} after"


def _broken(verdict: SoakVerdict) -> Table:
    said = [("answer", line) for line in verdict.wrong]
    said += [("still held", f"{name}: {value:g}") for name, value in verdict.held.items()]
    said += [("leak", line) for line in verdict.leaks] + [("ended by itself", name) for name in verdict.ended]
    note = f"{len(said) - _SHOWN} more are in {RESULTS}" if len(said) > _SHOWN else ""
    return Table(title="What is wrong", columns=("what", "where"), rows=tuple(said[:_SHOWN]), note=note)


def _usage(axes: Axes, results: Mapping[str, Any], measure: str, label: str) -> bool:
    """A line for each life of each process."""
    lines: dict[str, dict[int, list[Usage]]] = {}
    for sample in results["usage"]:
        lines.setdefault(sample["process"], {}).setdefault(sample["life"], []).append(sample)
    for number_, (process, lives) in enumerate(sorted(lines.items())):
        for life, samples in lives.items():
            times, values = zip(*((each["at_s"] / 60, each[measure]) for each in samples), strict=True)  # type: ignore[index]
            named = process if life == min(lives) else None
            axes.plot(times, values, color=f"C{number_ % 10}", linewidth=1, label=named)
    axes.set_xlabel("minutes")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend(frameon=False, fontsize=8, ncols=3)
    return bool(lines)


def _first_tokens(axes: Axes, results: Mapping[str, Any]) -> bool:
    """A dot for each stream, a line for each fault."""
    points = results["first_tokens_s"]
    for fault in results["faults"]:
        axes.axvline(fault["at_s"] / 60, color="0.85", linewidth=0.6, zorder=0)
    if points:
        times, values = zip(*points, strict=True)
        axes.scatter([at / 60 for at in times], values, s=3)
    axes.set_yscale("log")
    axes.set_xlabel("minutes; grey: faults")
    axes.set_ylabel("seconds")
    return bool(points)


_PLOTS = (
    ("first_tokens", "Time to first token", _first_tokens),
    ("memory", "Memory of every process", lambda axes, results: _usage(axes, results, "memory", "MiB (USS)")),
    ("files", "Open descriptors of every process", lambda axes, results: _usage(axes, results, "files", "descriptors")),
)
