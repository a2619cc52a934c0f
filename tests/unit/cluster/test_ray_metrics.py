"""What is handed to Ray adds up to what was counted, and its calls stay off the components' own paths."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.ray import metrics as ray_metrics
from cluster.ray.metrics import RaySink
from services.metrics.families import Family


class Recording:
    """In the place of one of Ray's metrics."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.calls: list[tuple[float, tuple[str, ...]]] = []

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses it"
        self.observe(value, tags)

    def observe(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.family.labels
        self.calls.append((value, tuple(tags.values())))

    set = observe


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recording]:
    found: dict[str, Recording] = {}

    def make(family: Family) -> Any:
        return found.setdefault(family.name, Recording(family))

    monkeypatch.setattr(ray_metrics, "_made", make)
    # Delivered by hand below.
    monkeypatch.setattr(ray_metrics, "_EVERY_S", 3600.0)
    return found


def test_what_is_counted_reaches_ray(made: dict[str, Recording]) -> None:
    sink = RaySink()
    requests, seconds, ready = sink.counter("requests_total"), sink.histogram("step_seconds"), sink.gauge("ready")
    for _ in range(3):
        requests.add(1, "stop", "OK")
    requests.add(0, "error", "INTERNAL")
    seconds.observe(0.5, "decode")
    seconds.observe(0.25, "prompt")
    ready.set(1)
    assert not any(recording.calls for recording in made.values())
    sink.deliver()
    assert made["requests_total"].calls == [(3, ("stop", "OK"))]
    assert made["step_seconds"].calls == [(0.5, ("decode",)), (0.25, ("prompt",))]
    assert made["ready"].calls == [(1, ())]
    sink.deliver()
    assert len(made["requests_total"].calls) == 1


def test_what_is_followed_reaches_ray(made: dict[str, Recording]) -> None:
    sink = RaySink()
    drafted, versions = {("suffix",): 5.0}, {("v1",): 1.0}
    sink.follow("drafted_by_source_total", lambda: drafted)
    sink.follow("index_info", lambda: versions)
    sink.deliver()
    drafted[("suffix",)] += 2
    drafted[("recycling",)] = 1
    del versions[("v1",)]
    versions[("v2",)] = 1
    sink.deliver()
    assert made["drafted_by_source_total"].calls == [(5, ("suffix",)), (2, ("suffix",)), (1, ("recycling",))]
    assert made["index_info"].calls == [(1, ("v1",)), (1, ("v2",)), (0, ("v1",))]


def test_a_reader_that_fails_stops_no_other(made: dict[str, Recording], caplog: pytest.LogCaptureFixture) -> None:
    sink = RaySink()
    sink.follow("ready", lambda: {(): 1 / 0})
    sink.follow("num_requests_running", lambda: {(): 4})
    sink.deliver()
    assert made["num_requests_running"].calls == [(4, ())]
    assert "ready could not be handed to Ray" in caplog.text


def test_what_ray_does_not_take_cannot_fill_the_memory(made: dict[str, Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_metrics, "_MOST_WAITING", 10)
    sink = RaySink()
    gap = sink.histogram("inter_token_latency_seconds")
    for _ in range(100):
        gap.observe(0.1)
    sink.deliver()
    assert len(made["inter_token_latency_seconds"].calls) == 10
