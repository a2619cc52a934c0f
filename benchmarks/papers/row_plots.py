"""Plots of rows that decode, for every paper: their figures side by side, and the losses by which heads were trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.papers.rows import speed_up, tau
from benchmarks.papers.units import Results
from services.drafter.heads.files.target_shape import TRAINING
from services.model_files.folder import read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_rows(axes: Axes, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Tokens per pass and speed-up of rows (what they are called, and their results), as pairs of bars."""
    for at, (_, result) in enumerate(rows):
        answers = result["answers"]
        for shift, figure, colour, name in ((-0.2, tau, "#4c72b0", "τ"), (0.2, speed_up, "#dd8452", "speed-up")):
            height = figure(answers)
            axes.bar(at + shift, height, 0.38, color=colour, label=name if at == 0 else None)
            axes.annotate(f"{height:.2f}", (at + shift, height), ha="center", va="bottom", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [label.replace(", ", ",\n") for label, _ in rows], fontsize=8)
    axes.set_ylabel("against plain decoding")
    if rows:
        axes.legend(frameon=False, loc="upper left")
    return bool(rows)


def training_losses(folder: Path) -> Mapping[str, Any]:
    """What a drafter's record tells of its losses, for ``DecodedRow.extra``; nothing where it does not."""
    record = read_json(folder / TRAINING, of="head") if (folder / TRAINING).is_file() else {}
    curves = record.get("losses")
    return {"losses": curves} if isinstance(curves, dict) and curves.get("step") else {}


def draw_losses(axes: Axes, units: Results, names: Sequence[str]) -> bool:
    """The losses of the rows ``names`` by the steps of their training; each loss has a style, each row a colour."""
    styles = ("-", "--", ":", "-.")
    rows = [(units[name]["label"], units[name]["losses"]) for name in names if "losses" in units.get(name, {})]
    for number, (label, curves) in enumerate(rows):
        for loss, style in zip([each for each in curves if each != "step"], styles, strict=False):
            axes.plot(curves["step"], curves[loss], style, color=f"C{number}", label=f"{label}: {loss}")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean over predictions")
    if rows:
        axes.legend(frameon=False)
    return bool(rows)
