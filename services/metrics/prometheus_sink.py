"""Keeps numbers in this process and writes them in Prometheus's text format.

The client's own Counter and Histogram are not used. They take half as long again and more per count, and add ``_created``
series unless the whole process turns them off. Their series have no bound, and they cannot read a component's own counters.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from services.metrics.families import FAMILIES, PREFIX, Family, family_of
from services.metrics.registry import CounterHandle, GaugeHandle, HistogramHandle, Values

log = logging.getLogger(__name__)

# Bound of the label combinations of one family. Further ones are counted together: a mistake must not fill the memory.
_MOST_SERIES = 512
_OTHER = "other"

_Described = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class _Series:
    """The series of one family, by label values."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.lock = threading.Lock()

    def key(self, labels: tuple[str, ...], known: int) -> tuple[str, ...]:
        """The series that a new combination of label values counts as."""
        if len(labels) != len(self.family.labels):
            raise ValueError(f"{self.family.name} has the labels {self.family.labels}, not {labels}")
        return labels if known < _MOST_SERIES else (_OTHER,) * len(labels)


class _Level(_Series):
    """A counter or a gauge."""

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.values: dict[tuple[str, ...], float] = {} if family.labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        with self.lock:
            if labels not in self.values:
                labels = self.key(labels, len(self.values))
            self.values[labels] = self.values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        with self.lock:
            if labels not in self.values:
                labels = self.key(labels, len(self.values))
            self.values[labels] = value


class _Distribution(_Series):
    """A histogram: for each combination of labels, observations per bucket and their sum."""

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.counts: dict[tuple[str, ...], list[int]] = {}
        self.sums: dict[tuple[str, ...], float] = {}
        if not family.labels:
            self._begin(())

    def observe(self, value: float, *labels: str) -> None:
        with self.lock:
            if labels not in self.counts:
                labels = self.key(labels, len(self.counts))
                if labels not in self.counts:
                    self._begin(labels)
            self.counts[labels][bisect.bisect_left(self.family.buckets, value)] += 1
            self.sums[labels] += value

    def _begin(self, labels: tuple[str, ...]) -> None:
        self.counts[labels] = [0] * (len(self.family.buckets) + 1)
        self.sums[labels] = 0.0

    def told(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, float]], float]]:
        """Label values, cumulated buckets and sum of every series."""
        bounds = [*map(str, self.family.buckets), "+Inf"]
        with self.lock:
            copied = [(labels, list(counts), self.sums[labels]) for labels, counts in self.counts.items()]
        for labels, counts, total in copied:
            yield labels, list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True)), total


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    @override
    def collect(self) -> Iterable[Metric]:
        return self._families


def written(families: Iterable[Metric]) -> bytes:
    """Families in Prometheus's text format. They have a registry of their own: nothing is shared with other libraries."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([*families]))
    return bytes(generate_latest(registry))


class PrometheusSink:
    """Implements ``Metrics``."""

    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}
        self._distributions: dict[str, _Distribution] = {}
        self._followed: dict[str, list[Callable[[], Values]]] = {}

    def counter(self, name: str) -> CounterHandle:
        """The counter; the same one for every caller."""
        return self._levels.setdefault(name, _Level(family_of(name, "counter")))

    def gauge(self, name: str) -> GaugeHandle:
        """The gauge; the same one for every caller."""
        return self._levels.setdefault(name, _Level(family_of(name, "gauge")))

    def histogram(self, name: str) -> HistogramHandle:
        """The histogram; the same one for every caller."""
        return self._distributions.setdefault(name, _Distribution(family_of(name, "histogram")))

    def follow(self, name: str, read: Callable[[], Values]) -> None:
        """Values of several readers are added up."""
        if FAMILIES[name].kind == "histogram":
            raise KeyError(f"{name} is a histogram: it cannot be followed")
        self._followed.setdefault(name, []).append(read)

    def exposition(self) -> bytes:
        """All numbers in Prometheus's text format."""
        return written(self.collect())

    def collect(self) -> Iterator[_Described]:
        """All numbers as Prometheus's client has them."""
        for name, family in FAMILIES.items():
            if name in self._distributions:
                yield self._histogram(self._distributions[name])
            elif name in self._levels or name in self._followed:
                yield self._level(family)

    def _level(self, family: Family) -> _Described:
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        told = kind(PREFIX + family.name, family.help, labels=family.labels)
        values: dict[tuple[str, ...], float] = {}
        if (level := self._levels.get(family.name)) is not None:
            with level.lock:
                values.update(level.values)
        for read in self._followed.get(family.name, ()):
            try:
                for labels, value in read().items():
                    values[labels] = values.get(labels, 0.0) + value
            except Exception:
                log.exception("%s cannot be read", family.name)
        for labels, value in values.items():
            told.add_metric(labels, value)
        return told

    def _histogram(self, found: _Distribution) -> HistogramMetricFamily:
        told = HistogramMetricFamily(PREFIX + found.family.name, found.family.help, labels=found.family.labels)
        for labels, buckets, total in found.told():
            told.add_metric(labels, buckets, total)
        return told
