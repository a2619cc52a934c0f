"""Goes through a paper's units: measures those that are not measured yet, and keeps each result at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from benchmarks.bench import environment
from benchmarks.papers.store import PaperFolder
from benchmarks.papers.units import Advance, Unit

# Opens a bar of so many answers for a unit.
Progress = Callable[[str, int], AbstractContextManager[Advance]]


def measure_units(units: Sequence[Unit], folder: PaperFolder, progress: Progress) -> None:
    """Measure what is not measured yet, and keep each result at once.

    Raises:
        ConfigurationError: a unit cannot be measured here; what was measured before stays.
    """
    for unit in units:
        if not folder.has(unit.name):
            with progress(unit.name, unit.answers) as advance:
                result = _measured(unit, advance)
            folder.write(unit.name, result)


def _measured(unit: Unit, advance: Advance) -> dict[str, Any]:
    began = datetime.now(UTC)
    found = unit.measure(advance)
    return {
        **found,
        "measured": began.isoformat(timespec="seconds"),
        "duration_s": (datetime.now(UTC) - began).total_seconds(),
        "commit": environment.commit(),
    }


def changed_answers(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The answers that differ from plain decoding's, each with its row."""
    return [f"{name}: {answer}" for name, result in results.items() for answer in result["changed"]]
