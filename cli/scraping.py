"""Reads a service's numbers over HTTP, as Prometheus would, and compares two readings."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from outrider._addresses import is_loopback
from services.metrics.added_up import Labels, own_samples
from services.metrics.families import FAMILIES
from speculation.errors import OutriderError, Unavailable

_TIMEOUT_S = 5.0
_MOST_BYTES = 64 * 2**20
# A line that says where the numbers are; the router's own /metrics has them on Ray.
_POINTER = "# see "


@dataclass(slots=True)
class Reading:
    """All numbers of a service at one time, added up over its processes.

    Attributes:
        at: when it was read, in seconds of a clock that does not jump.
        values: of every sample, such as ``step_seconds_sum`` without the prefix, by its own labels.
        series: how many processes told a sample of that name.
    """

    at: float
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    series: dict[str, int] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """A sample's value, over all labels but those given."""
        wanted = set(labels.items())
        return sum(value for found, value in self.values.get(name, {}).items() if wanted <= set(found))

    def by(self, name: str, label: str) -> dict[str, float]:
        """A sample's values by one of its labels."""
        totals: dict[str, float] = {}
        for found, value in self.values.get(name, {}).items():
            key = dict(found).get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals

    def mean(self, name: str) -> float:
        """A gauge's value per process that tells it."""
        return self.sum(name) / max(1, self.series.get(name, 0))

    def since(self, earlier: Reading) -> Reading:
        """What numbers have grown by. A counter that has shrunk was started anew; a gauge may shrink."""
        grown = Reading(at=self.at - earlier.at, series=self.series)
        for name, values in self.values.items():
            before, gauge = earlier.values.get(name, {}), name in FAMILIES and FAMILIES[name].kind == "gauge"
            pairs = ((labels, value, before.get(labels, 0.0)) for labels, value in values.items())
            grown.values[name] = {labels: value - old if gauge or value >= old else value for labels, value, old in pairs}
        return grown

    def average(self, name: str) -> float | None:
        """The mean observation of a histogram; None if there are none."""
        count = self.sum(f"{name}_count")
        return self.sum(f"{name}_sum") / count if count else None

    def quantile(self, name: str, share: float) -> float | None:
        """A quantile of a histogram, linear within its bucket as in PromQL; None if there are no observations."""
        buckets = sorted((float(bound), count) for bound, count in self.by(f"{name}_bucket", "le").items())
        if not buckets or not buckets[-1][1]:
            return None
        rank, below, count_below = share * buckets[-1][1], 0.0, 0.0
        for bound, count in buckets:
            if count >= rank:
                if bound == float("inf"):
                    return below
                inside = count - count_below
                return below + (bound - below) * ((rank - count_below) / inside if inside else 1.0)
            below, count_below = bound, count
        return below


def read(urls: Sequence[str]) -> Reading:
    """The numbers at ``urls``, or where those point to.

    Raises:
        Unavailable: one of them does not answer.
        OutriderError: what answers is no metrics of Outrider.
    """
    texts = [_fetched(url) for url in urls]
    pointed = dict.fromkeys(line.removeprefix(_POINTER) for text in texts for line in _pointers(text))
    texts += [_fetched(url) for url in pointed]
    reading = Reading(at=time.monotonic())
    for text in texts:
        _add(reading, text)
    if not reading.values and not pointed:
        raise OutriderError(f"{', '.join(urls)}: no metrics of Outrider there (metrics.export may be none)")
    return reading


def _pointers(text: str) -> Iterable[str]:
    return (line.strip() for line in text.splitlines() if line.startswith(_POINTER + "http"))


def _fetched(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise OutriderError(f"--url is {url}: must begin with http:// or https://")
    try:
        # No proxy leads to this machine, whatever the environment says.
        direct = [urllib.request.ProxyHandler({})] if is_loopback(urlsplit(url).hostname or "") else []
        with urllib.request.build_opener(*direct).open(url, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read(_MOST_BYTES)
            return content.decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        why = getattr(why, "strerror", None) or why
        raise Unavailable(
            f"no metrics at {url} ({why}); start a server with: outrider serve, or name its server.ops_port with --url"
        ) from error


def _add(reading: Reading, text: str) -> None:
    """Add the samples of one process; Ray's own labels are left out."""
    try:
        for _, name, labels, value in own_samples(text):
            values = reading.values.setdefault(name, {})
            values[labels] = values.get(labels, 0.0) + value
            reading.series[name] = reading.series.get(name, 0) + 1
    except ValueError as error:
        raise OutriderError(f"that is no text of Prometheus's format: {error}") from error
