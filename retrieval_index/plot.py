"""A histogram of perplexities with the limit of the filter."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from speculation.errors import ConfigurationError


def check_available() -> None:
    """Check for matplotlib before hours of scoring, not after them.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("the histogram needs matplotlib: pip install 'outrider-server[bench]'")


def draw_histogram(perplexities: Sequence[float], limit: float, path: Path) -> None:
    """Write the histogram as a PNG file."""
    from matplotlib.figure import Figure

    finite = [value for value in perplexities if math.isfinite(value)]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low, high = min(finite, default=1.0), max(finite, default=10.0)
    steps = 40
    edges = [low * (max(high / low, 1.01)) ** (step / steps) for step in range(steps + 1)]
    axes.hist(finite, bins=edges, color="#4c72b0")
    axes.axvline(limit, color="#c44e52", label=f"kept: perplexity up to {limit:.1f}")
    axes.set_xscale("log")
    axes.set_xlabel("perplexity under the target")
    axes.set_ylabel("documents")
    axes.set_title(f"{len(perplexities):,} documents")
    axes.legend()
    figure.savefig(path, dpi=120)
