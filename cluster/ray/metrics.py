"""Hands numbers to Ray's agent on each node, which exports them to Prometheus with the prefix ``ray_``."""

from __future__ import annotations

import http.client
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray.util import metrics as ray_metrics

from services.metrics.added_up import added_up
from services.metrics.families import FAMILIES, PREFIX, Family, family_of
from services.metrics.registry import CounterHandle, GaugeHandle, HistogramHandle, Values

log = logging.getLogger(__name__)

# Seconds between two deliveries. Ray's calls take microseconds each, so they are kept off the components' own paths.
_EVERY_S = 1.0
# Most observations that wait for a delivery; beyond, a thread that does not get to run would let them fill the memory.
_MOST_WAITING = 100_000
# Of the agents: how many are asked at once, seconds in which one answers, and the most bytes that are read.
_AT_ONCE, _ANSWERS_S, _MOST_BYTES = 16, 5.0, 64 << 20


class _Pending:
    """What has been counted of one family since the last delivery."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.events: list[tuple[float, tuple[str, ...]]] = []
        self._theirs = _made(family)

    def add(self, amount: float, *labels: str) -> None:
        if len(self.events) < _MOST_WAITING:
            self.events.append((amount, labels))

    observe = set = add

    def deliver(self) -> None:
        """Tell Ray."""
        # Appending is atomic, and so is this exchange.
        events, self.events = self.events, []
        if self.family.kind == "counter":
            sums: dict[tuple[str, ...], float] = {}
            for amount, labels in events:
                sums[labels] = sums.get(labels, 0.0) + amount
            for labels, amount in sums.items():
                self.record(amount, labels)
            return
        for value, labels in events:
            self.record(value, labels)

    def record(self, value: float, labels: tuple[str, ...]) -> None:
        """One call to Ray."""
        tags = dict(zip(self.family.labels, labels, strict=True))
        if self.family.kind == "counter":
            if value > 0:
                self._theirs.inc(value, tags=tags)
        elif self.family.kind == "gauge":
            self._theirs.set(value, tags=tags)
        else:
            self._theirs.observe(value, tags=tags)


class _Followed:
    """A number that its owner keeps."""

    def __init__(self, pending: _Pending, read: Callable[[], Values]) -> None:
        self.pending = pending
        self._read = read
        self._told: dict[tuple[str, ...], float] = {}

    def deliver(self) -> None:
        """Tell Ray what has changed."""
        values, counts = dict(self._read()), self.pending.family.kind == "counter"
        for labels, value in values.items():
            self.pending.record(value - (self._told.get(labels, 0.0) if counts else 0.0), labels)
        if counts:
            self._told.update(values)
            return
        # A gauge whose series is gone, such as an index's old version, would be told for ever.
        for labels in self._told.keys() - values.keys():
            self.pending.record(0.0, labels)
        self._told = values


def _logged(pending: _Pending, deliver: Callable[[], None]) -> None:
    try:
        deliver()
    except Exception:
        log.exception("%s could not be handed to Ray", pending.family.name)


def _made(family: Family) -> Any:
    name = PREFIX + family.name
    if family.kind == "counter":
        return ray_metrics.Counter(name, family.help, family.labels)
    if family.kind == "gauge":
        return ray_metrics.Gauge(name, family.help, family.labels)
    return ray_metrics.Histogram(name, family.help, list(family.buckets), family.labels)


class RaySink:
    """Implements ``Metrics``. What is counted reaches Ray once a second, from a thread of its own."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self._followed: list[_Followed] = []
        threading.Thread(target=self._deliver_for_ever, name="ray-metrics", daemon=True).start()

    def counter(self, name: str) -> CounterHandle:
        """The counter; the same one for every caller."""
        return self._of(family_of(name, "counter"))

    def gauge(self, name: str) -> GaugeHandle:
        """The gauge; the same one for every caller."""
        return self._of(family_of(name, "gauge"))

    def histogram(self, name: str) -> HistogramHandle:
        """The histogram; the same one for every caller."""
        return self._of(family_of(name, "histogram"))

    def follow(self, name: str, read: Callable[[], Values]) -> None:
        """Of counters, what they have grown by since the last delivery is handed on."""
        self._followed.append(_Followed(self._of(FAMILIES[name]), read))

    def _of(self, family: Family) -> _Pending:
        if family.name not in self._pending:
            self._pending[family.name] = _Pending(family)
        return self._pending[family.name]

    def _deliver_for_ever(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self.deliver()

    def deliver(self) -> None:
        """Tell Ray what has come since the last time."""
        for pending in list(self._pending.values()):
            _logged(pending, pending.deliver)
        for followed in list(self._followed):
            _logged(followed.pending, followed.deliver)


def pointer() -> bytes:
    """What ``/metrics`` of the ops port says on Ray: where Ray's agents export the numbers. ``outrider top`` goes there."""
    lines = ["# On Ray, every node's agent exports the numbers of the components on it, with the prefix ray_:"]
    return "\n".join([*lines, *(f"# see {url}" for url in _agents()), ""]).encode()


def gathered() -> Iterator[Metric]:
    """What the agents of all nodes export, added up. A node whose agent does not answer is left out, and logged."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        texts = [text for text in threads.map(_fetched, _agents()) if text is not None]
    return added_up(texts)


def _agents() -> list[str]:
    nodes = (node for node in ray.nodes() if node.get("Alive"))
    return [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]


def _fetched(url: str) -> str | None:
    try:
        # No proxy leads to a component.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=_ANSWERS_S) as answer:
            content: bytes = answer.read(_MOST_BYTES)
            return content.decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        log.warning("the agent at %s tells no numbers: %s", url, error)
        return None
