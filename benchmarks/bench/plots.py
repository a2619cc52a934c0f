"""Draws the plots of a result as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculation.colours import colour_of
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Mapping[str, Any]
Plots = tuple[tuple[str, str, "Callable[[Axes, Results], bool]"], ...]


def draw(results: Results, folder: Path, plots: Plots | None = None) -> list[tuple[str, Path]]:
    """Write the plots for which there is data; returns title and file of each.

    Args:
        plots: file name, title, and what draws it and says whether there is data; None: those of ``outrider bench``.

    Raises:
        ConfigurationError: matplotlib is not installed; says how to install it.
    """
    check_installed()
    import matplotlib

    matplotlib.use("Agg")
    # No date and no random ids, so that equal results give equal files.
    matplotlib.rcParams.update({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, title, plot in _PLOTS if plots is None else plots:
        figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
        if plot(axes, results):
            axes.set_title(title, loc="left", fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            drawn.append((title, path))
        pyplot.close(figure)
    return drawn


def check_installed() -> None:
    """Raises:
    ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("plots need matplotlib: pip install 'outrider-server[bench]'") from error


def _colour(name: str, results: Results) -> str:
    """A strategy's own colour, as everywhere; peers have greys, the later the lighter."""
    peers = list(results["settings"]["peers"])
    return f"{0.25 + 0.5 * peers.index(name) / len(peers):.2f}" if name in peers else colour_of(name)


def _legend(axes: Axes) -> None:
    """Beside the axes, where it covers nothing."""
    axes.figure.legend(frameon=False, fontsize=8, loc="outside right upper")


def _first(results: Results) -> list[dict[str, Any]]:
    least = min(results["settings"]["concurrency"])
    return [record for record in results["summary"] if record["concurrency"] == least]


def _speed_up(axes: Axes, results: Results) -> bool:
    base = results["settings"]["base"]
    records = [r for r in results["summary"] if r["concurrency"] == 1 and r["contestant"] != base]
    tasks = list(dict.fromkeys(task for record in records for task in record["tasks"]))
    if not records:
        return False
    width = 0.8 / len(records)
    for index, record in enumerate(records):
        known = [(at, record["tasks"][task]["speed_up"]) for at, task in enumerate(tasks) if task in record["tasks"]]
        known = [(at, values) for at, values in known if values["median"] is not None]
        places = [at + (index - (len(records) - 1) / 2) * width for at, _ in known]
        medians = [values["median"] for _, values in known]
        low = [values["median"] - values["low"] for _, values in known]
        high = [values["high"] - values["median"] for _, values in known]
        name = record["contestant"]
        axes.bar(places, medians, width * 0.9, yerr=(low, high), capsize=2, label=name, color=_colour(name, results))
    axes.axhline(1, color="black", linewidth=0.8)
    # Long names next to each other would overlap.
    axes.set_xticks(range(len(tasks)), [task.replace("_", " ") for task in tasks], rotation=20, ha="right")
    axes.set_ylabel(f"speed / {base}")
    _legend(axes)
    return True


def _positions(axes: Axes, results: Results) -> bool:
    records = [record for record in _first(results) if record["acceptance_per_position"]]
    for record in records:
        shares = record["acceptance_per_position"]
        name = record["contestant"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name, color=_colour(name, results))
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of passes that accept it")
    _legend(axes)
    return bool(records)


def _cumulative(axes: Axes, results: Results) -> bool:
    curves = results["cumulative_tokens"]
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=name, color=_colour(name, results))
    axes.set_xlabel("step (passes of one request)")
    axes.set_ylabel("tokens so far, mean over requests")
    _legend(axes)
    return bool(curves)


def _throughput(axes: Axes, results: Results) -> bool:
    levels = results["settings"]["concurrency"]
    if len(levels) < 2:
        return False
    for name in dict.fromkeys(record["contestant"] for record in results["summary"]):
        own = sorted(
            (record["concurrency"], record["tokens_per_second"])
            for record in results["summary"]
            if record["contestant"] == name
        )
        at = [level for level, _ in own]
        medians = [speed["median"] for _, speed in own]
        spread = (
            [speed["median"] - speed["low"] for _, speed in own],
            [speed["high"] - speed["median"] for _, speed in own],
        )
        dashed = "--" if name in results["settings"]["peers"] else "-"
        colour = _colour(name, results)
        axes.errorbar(at, medians, yerr=spread, marker="o", capsize=2, label=name, color=colour, linestyle=dashed)
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(level) for level in levels])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second")
    _legend(axes)
    return True


_PLOTS: Plots = (
    ("speed_up", "Speed-up per task", _speed_up),
    ("acceptance", "Acceptance per position", _positions),
    ("cumulative", "Cumulative tokens against steps", _cumulative),
    ("throughput", "Throughput against concurrency", _throughput),
)
