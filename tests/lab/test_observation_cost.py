"""The benchmark of what metrics and traces cost: that it observes what it says, and its arithmetic."""

from __future__ import annotations

import asyncio
import time

import pytest

from lab import observation_cost
from lab.observation_cost import METRICS, TRACES, ObservedAndBare, comparisons, loop_steps, measure, traced

pytestmark = pytest.mark.exhaustive


def test_all_that_observes_is_measured() -> None:
    with traced() as tracer:
        found = comparisons(tracer)
        costs = asyncio.run(measure(found, 20, 1))
    assert [cost.kind for cost in costs.values()] == [METRICS, METRICS, TRACES, TRACES]
    assert costs.keys() == found.keys()


def test_requests_and_steps_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    async def observed(events: int) -> None:
        nonlocal clock
        clock += 70e-6 + 3e-6 * events

    monkeypatch.setattr(time, "thread_time", lambda: clock)
    costs = asyncio.run(measure({"x": ObservedAndBare(kind=METRICS, observed=observed, bare=loop_steps(None))}, 11, 3))
    assert costs["x"].per_step == pytest.approx(3.0)
    assert costs["x"].per_request == pytest.approx(73.0)


def test_the_step_counter_sees_every_step() -> None:
    """What is timed is the loop's own observation, into a real sink."""
    sink = observation_cost.PrometheusSink()
    metrics = observation_cost.LoopMetrics(sink, observation_cost.LoopStats(), _NoRequests())  # type: ignore[arg-type]
    asyncio.run(loop_steps(metrics)(7))
    assert b"outrider_step_rows_count 7.0" in sink.exposition()


class _NoRequests:
    live = waiting = ()
