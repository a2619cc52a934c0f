"""What a paper is made of: units of measurement, each written down once it is whole, and the tables made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.bench.plots import Plots
from benchmarks.bench.tables import Table

# A unit's result, as JSON, by the unit's name.
Results = Mapping[str, Mapping[str, Any]]
Advance = Callable[[], None]


class Unit(Protocol):
    """One row of a table, or rows that only make sense together."""

    @property
    def name(self) -> str:
        """Unique in the paper; the name of its file."""

    @property
    def answers(self) -> int:
        """How often ``measure`` calls ``advance``."""

    def measure(self, advance: Advance) -> dict[str, Any]:
        """Measure. In the result, ``changed`` names the answers that differ from plain decoding's.

        Raises:
            ConfigurationError: it cannot be measured here; says what to make first.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What is measured of a paper with certain options.

    Attributes:
        deviations: where this is not the paper's experiment, in sentences: footnotes of the page.
    """

    units: Sequence[Unit]
    deviations: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A paper, whatever the options.

    Attributes:
        name: on the command line.
        tables: made of the results so far; rows that are not measured are left out.
        plots: as in ``benchmarks.bench.plots``, of ``{"units": results}``.
    """

    name: str
    title: str
    about: str
    tables: Callable[[Results], list[Table]]
    plots: Plots = ()
