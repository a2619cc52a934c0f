"""Tables, plots and pages of a simulated day."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench.plots import Plots, draw
from benchmarks.bench.report import write_pages
from benchmarks.bench.tables import Table, number
from benchmarks.fleet.autoscale import AUTOSCALED, ComparedFleets, asked_for
from benchmarks.fleet.outcomes import LATE_S, FleetOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = "results.json"
_TITLE = "outrider bench autoscale"
WORDS = {
    "$/M tokens": "dollars for all GPUs that were paid for, per million tokens of whole answers",
    "GPU hours": "from the asking for a node until it is given back: starts, drains and idle minutes included",
    "TTFT": "seconds from a request's arrival to its first token, those that were refused left out",
    "TPOT": "an answer's milliseconds from its first token to its last, per token but the first",
    "late": f"share of all requests whose first token came after more than {LATE_S:g} s, or never",
    "refused": "requests that were told to come again (queues full, or no verifier there)",
    "lost": "answers that broke off",
    "moved": "times that an answer went on at another verifier: after a drain, or a death",
}


def tables_of(compared: ComparedFleets) -> list[Table]:
    """The fleets, and what the policy asks for at which load."""
    return [_fleets(compared), _asked(compared)]


def _fleets(compared: ComparedFleets) -> Table:
    return Table(
        title="Fleets through the same day",
        columns=(
            "fleet", "$/M tokens", "GPU hours", "TTFT p50 s", "p99", "TPOT p50 ms", "p99", "late", "refused", "lost",
            "moved", "verifiers", "on average",
        ),
        rows=tuple(_row(found) for found in compared.outcomes),
        note=f"{compared.requests:,} requests; tokens: {compared.prompt_tokens:,} in, {compared.answer_tokens:,} out",
    )  # fmt: skip


def _row(found: FleetOutcome) -> tuple[str, ...]:
    return (
        found.name,
        number(found.per_million, ".3f"),
        number(found.gpu_hours, ",.1f"),
        number(found.first_p50_s, ".2f"),
        number(found.first_p99_s, ".2f"),
        number(1e3 * found.per_token_p50_s),
        number(1e3 * found.per_token_p99_s),
        f"{found.late_share:.2%}",
        f"{found.refused:,}",
        f"{found.lost:,}",
        f"{found.moved:,}",
        f"{found.fewest} to {found.most}",
        number(found.mean_running, ".2f"),
    )


def _asked(compared: ComparedFleets) -> Table:
    slots, bounds = compared.config.hardware.max_num_seqs, compared.config.bounds
    rows = [
        (str(replicas), f"{more:,} ({more / replicas / slots:.0%})", f"{fewer:,} ({fewer / replicas / slots:.0%})")
        for replicas, more, fewer in asked_for(slots, bounds.max_replicas)
        if bounds.min_replicas <= replicas
    ]
    return Table(
        title="What the policy asks for",
        columns=("verifiers", "one more from requests (of slots)", "one fewer below"),
        rows=tuple(rows),
        note="decoding requests of all together, when neither pool nor queue ask; bounds and delays come besides",
    )


def facts_of(compared: ComparedFleets) -> list[tuple[str, str]]:
    """What was set, for the top of the page."""
    config, hardware = compared.config, compared.config.hardware
    traffic = config.traffic
    bounds, fleet = config.bounds, config.fleet
    drawn = (
        f"{traffic.days:g} days, {traffic.per_s:g} conversations a second on average, {traffic.bursts} bursts a day "
        f"({traffic.burst_factor:g} times the load for {traffic.burst_s / 60:g} minutes), seed {config.seed}"
    )
    return [
        (
            "simulated",
            "clock, machines and requests; cluster/ray/scaling.py and cluster/verifiers/choice.py decide as in service",
        ),
        ("requests", drawn if config.recorded is None else f"recorded: {config.recorded}"),
        ("cost of a pass", hardware.source),
        (
            "a verifier",
            f"{hardware.gpus} GPU{'s' * (hardware.gpus > 1)}, {hardware.max_num_seqs} slots, {hardware.max_waiting} may wait"
            f", a pool of {hardware.kv_cache_tokens:,} tokens",
        ),
        ("drafts", f"accepted at 1, 2, ...: {' '.join(f'{share:g}' for share in config.acceptance) or 'none'}"),
        ("price", f"${config.price:g} for a GPU and hour"),
        (
            "starts",
            f"{fleet.node_s:g} s for a node and {fleet.load_s:g} s for the model, up to {fleet.jitter:.0%} more or less; "
            f"{fleet.deaths} verifiers die",
        ),
        (
            "autoscaling",
            f"{bounds.min_replicas} to {bounds.max_replicas} verifiers, up after {bounds.upscale_delay_s:g} s, "
            f"down after {bounds.downscale_delay_s:g} s, drained for {fleet.drain_s:g} s",
        ),
    ]


def write_fleet_report(compared: ComparedFleets, folder: Path) -> None:
    """Write ``results.json``, ``report.html``, ``report.md`` and ``plots/``.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    results = compared.as_object()
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    plots = draw(results, folder / "plots", _PLOTS)
    write_pages(folder, f"{_TITLE}: {compared.config.hardware.name}", facts_of(compared), tables_of(compared), plots, WORDS)


def _followed(results: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    moments: Sequence[Mapping[str, Any]] = results["outcomes"][0]["moments"]
    return moments


def _replicas(axes: Axes, results: Mapping[str, Any]) -> bool:
    moments = _followed(results)
    hours = [moment["at_s"] / 3600 for moment in moments]
    axes.step(hours, [moment["paid"] for moment in moments], where="post", label="verifiers paid for", linewidth=0.8)
    axes.step(hours, [moment["running"] for moment in moments], where="post", label="verifiers running")
    axes.set_xlabel("hour")
    axes.set_ylabel("verifiers")
    axes.set_ylim(bottom=0)
    load = axes.twinx()
    every_s = results["fleet"]["every_s"]
    rates = [moment["arrived"] / every_s for moment in moments]
    load.plot(hours, rates, color="grey", linewidth=0.8, label="requests per second (right)")
    load.set_ylim(bottom=0)
    load.spines["top"].set_visible(False)
    lines = [*axes.get_lines(), *load.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8)
    return len(moments) > 1


def _waiting(axes: Axes, results: Mapping[str, Any]) -> bool:
    for found in results["outcomes"]:
        moments = found["moments"]
        hours = [moment["at_s"] / 3600 for moment in moments]
        bold = found["name"] == AUTOSCALED
        axes.plot(hours, [m["waiting"] for m in moments], label=found["name"], linewidth=1.8 if bold else 0.9)
    axes.set_xlabel("hour")
    axes.set_ylabel("requests without a slot")
    axes.set_yscale("symlog")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return True


def _trade(axes: Axes, results: Mapping[str, Any]) -> bool:
    for found in results["outcomes"]:
        axes.scatter([found["per_million"]], [max(1e-3, found["first_p99_s"])])
        place = (found["per_million"], max(1e-3, found["first_p99_s"]))
        axes.annotate(found["name"], place, textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.axhline(LATE_S, color="grey", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("dollars per million tokens")
    axes.set_ylabel("time to first token, p99, s")
    return True


_PLOTS: Plots = (
    ("replicas", "Verifiers over the day", _replicas),
    ("waiting", "Requests without a slot", _waiting),
    ("trade", "What it costs, and how long one waits", _trade),
)
