"""What a run's loss was made of, and its acceptance, step by step: from its log to a record that is short enough to keep."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LOG = "log.jsonl"
# Points of a curve; each is the mean over as many steps as it stands for.
_POINTS = 100


def loss_curves(run: Path, last: int) -> dict[str, list[float]] | None:
    """The losses of a run up to its step ``last``.

    Returns:
        by name of the loss one mean for each stretch of steps, and under ``step`` the last step of each; None: the log is
        gone, or the run's loss is one thing.
    """
    return _curves(run, last, lambda entry: entry.get("losses", {}))


def acceptance_curve(run: Path, last: int) -> dict[str, list[float]] | None:
    """The chance that the first drafted token is accepted, under ``acceptance``; otherwise as ``loss_curves``."""
    return _curves(run, last, lambda entry: {"acceptance": entry["acceptance"]})


def _curves(run: Path, last: int, read: Callable[[Any], Mapping[str, Any]]) -> dict[str, list[float]] | None:
    by_step = {step: values for step, values in _logged(run / LOG, read) if step <= last}
    names = sorted({name for values in by_step.values() for name in values})
    steps = sorted(step for step, values in by_step.items() if values.keys() == set(names))
    if not names or not steps:
        return None
    size = -(-len(steps) // _POINTS)
    stretches = [steps[at : at + size] for at in range(0, len(steps), size)]
    curves: dict[str, list[float]] = {"step": [stretch[-1] for stretch in stretches]}
    for name in names:
        curves[name] = [float(f"{statistics.fmean(by_step[step][name] for step in part):.4g}") for part in stretches]
    return curves


def _logged(log: Path, read: Callable[[Any], Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Step of each line, and what ``read`` finds there. A run that went on from an earlier step logs steps again: the last
    lines count."""
    try:
        lines = log.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            entry: Any = json.loads(line)
            yield int(entry["step"]), {str(name): float(value) for name, value in read(entry).items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            # A line that a crash has cut off.
            continue
