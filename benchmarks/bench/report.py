"""Writes the report as one self-contained HTML file, and as Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markupsafe import Markup

from benchmarks.bench.measures import FORMULAS
from benchmarks.bench.plots import draw
from benchmarks.bench.summary import verdict_line
from benchmarks.bench.tables import Table, all_tables, markdown

Results = Mapping[str, Any]


def write_report(results: Results, folder: Path) -> None:
    """Write ``report.html``, ``report.md`` and ``plots/``.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    plots = draw(results, folder / "plots")
    write_pages(
        folder, _title(results), _facts(results), all_tables(results), plots, FORMULAS, verdict=verdict_line(results)
    )


def write_pages(
    folder: Path,
    title: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    plots: Sequence[tuple[str, Path]],
    formulas: Mapping[str, str],
    verdict: str = "",
) -> None:
    """Write ``report.html``, with everything in it, and ``report.md`` beside the plots.

    Args:
        verdict: what all of it says, in a line; empty: nothing stands there.
    """
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(["html"]))
    page = environment.get_template("report.html").render(
        title=title,
        verdict=verdict,
        facts=facts,
        tables=tables,
        plots=[(name, Markup(_inline(path, index))) for index, (name, path) in enumerate(plots)],
        formulas=formulas,
    )
    (folder / "report.html").write_text(page)
    (folder / "report.md").write_text(_markdown(title, verdict, facts, tables, plots))


def _title(results: Results) -> str:
    partial = " (partial: interrupted)" if results["partial"] else ""
    return f"outrider bench: {results['settings']['model']}{partial}"


def _facts(results: Results) -> list[tuple[str, str]]:
    environment, settings = results["environment"], results["settings"]
    memory = environment["memory_bytes"] / 2**30
    gpus = ", ".join(environment["gpus"]) or "no GPU"
    return [
        ("command", settings["command"]),
        ("prompts", f"{settings['prompts']}: {settings['requests']} requests, up to {settings['max_tokens']} tokens"),
        ("sampling", f"temperature {settings['temperature']:g}, seed {settings['seed']}; {settings['dtype']}"),
        ("components", {"ray": "on a local Ray, linked by gRPC"}.get(settings.get("on", ""), "in one process")),
        ("repeats", f"{settings['repeats']}, contestants by turns; each begins with an empty memory of earlier answers"),
        ("machine", f"{environment['processor']}, {environment['cores']} cores, {memory:.0f} GiB, {gpus}"),
        ("threads", str(environment["threads"])),
        ("system", f"{environment['system']}, Python {environment['python']}"),
        ("version", f"Outrider {environment['outrider']}, commit {environment['commit'] or 'unknown'}"),
        ("measured", f"{results['started']}, {results['duration_s'] / 60:.1f} minutes"),
    ]


def _inline(path: Path, index: int) -> str:
    """An SVG for inclusion in a page: without prolog, and with ids that are unique in the page."""
    svg = path.read_text()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="p{index}-\1"', svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>p{index}-", svg)


def _markdown(
    title: str,
    verdict: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    plots: Sequence[tuple[str, Path]],
) -> str:
    parts = [f"## {title}", "", *([verdict, ""] if verdict else [])]
    parts += [f"![{html.escape(name)}](plots/{path.name})\n" for name, path in plots]
    parts += [f"- {name}: {value}" for name, value in facts] + [""]
    parts += [markdown(table) for table in tables]
    return "\n".join(parts)
