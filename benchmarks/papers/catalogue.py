"""The papers by name, and what makes their experiments; imported when needed, since these import torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.papers.units import Experiment, Paper
from benchmarks.papers.workbench import Workbench

NAMES = ("spectra", "disco", "fspad", "streaming", "blog")


def paper_of(name: str) -> Paper:
    """A paper's tables and plots."""
    found: Paper = importlib.import_module(f"benchmarks.papers.{name}").PAPER
    return found


def experiment_of(name: str, bench: Workbench) -> Experiment:
    """What is measured of a paper.

    Raises:
        ConfigurationError: something that it needs is not there; says what to make, and how.
    """
    make: Callable[[Workbench], Experiment] = getattr(importlib.import_module(f"benchmarks.papers.{name}"), name)
    return make(bench)
