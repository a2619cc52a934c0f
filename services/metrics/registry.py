"""The port through which components report numbers, by name and labels. The sinks are behind it.

A component counts with a handle. A number that it keeps anyway is read on demand (``Metrics.follow``), which costs nothing
until then. Handles may be used from any thread, and never raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

# The present value for each combination of label values, in the order of ``Family.labels``; () where there are no labels.
Values = Mapping[tuple[str, ...], float]


class CounterHandle(Protocol):
    """Adds to a counter."""

    def add(self, amount: float, *labels: str) -> None:
        """Add ``amount``, at least 0; ``labels`` are the values of the family's labels."""


class GaugeHandle(Protocol):
    """Sets a gauge."""

    def set(self, value: float, *labels: str) -> None:
        """Say the present value."""


class HistogramHandle(Protocol):
    """Adds to a histogram."""

    def observe(self, value: float, *labels: str) -> None:
        """Count one observation."""


class Metrics(Protocol):
    """Where numbers go. Names are those of ``services/metrics/families.py``, without the prefix; others raise KeyError."""

    def counter(self, name: str) -> CounterHandle:
        """The handle of a counter."""

    def gauge(self, name: str) -> GaugeHandle:
        """The handle of a gauge."""

    def histogram(self, name: str) -> HistogramHandle:
        """The handle of a histogram."""

    def follow(self, name: str, read: Callable[[], Values]) -> None:
        """Have a counter or gauge read where its owner keeps it.

        Args:
            read: called from any thread whenever the numbers are wanted; must be fast. Of a counter, totals since the start.
        """


class Dropping:
    """Implements ``Metrics`` and all handles: drops everything."""

    def counter(self, name: str) -> CounterHandle:
        """This object."""
        return self

    def gauge(self, name: str) -> GaugeHandle:
        """This object."""
        return self

    def histogram(self, name: str) -> HistogramHandle:
        """This object."""
        return self

    def follow(self, name: str, read: Callable[[], Values]) -> None:
        """Nothing is read."""

    def add(self, amount: float, *labels: str) -> None:
        """Nothing is counted."""

    def set(self, value: float, *labels: str) -> None:
        """Nothing is set."""

    def observe(self, value: float, *labels: str) -> None:
        """Nothing is observed."""


DROPPED = Dropping()
