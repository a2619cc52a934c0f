"""Calls that wait for a slow drafter: bounded, in order, and hidden states are what goes first."""

from __future__ import annotations

import asyncio

import pytest

from services.links.call_queue import END, CallQueue
from speculation.messages import CloseSession, FeatureChunk, StepReport
from speculation.types import Features, Observation


def chunk(name: str, rows: int = 1) -> FeatureChunk:
    return FeatureChunk(session_id=name, features=Features(data=bytes(8 * rows), rows=rows, width=2, dtype="float32"))


def step(name: str, rows: int) -> StepReport:
    observed = Observation(top_ids=((1,),), features=chunk(name, rows).features)
    return StepReport(
        session_id=name, committed=(1,), length=1, prefix_hash=0, accepted_path=(), max_nodes=1, observation=observed
    )


def read(calls: CallQueue) -> list[object]:
    found: list[object] = []
    while len(calls):
        found.append(calls.get_nowait())
    return found


def test_calls_come_in_order_and_no_more_than_fit() -> None:
    calls = CallQueue(most_calls=2)
    assert [calls.push(CloseSession(session_id=name)) for name in "abc"] == [True, True, False]
    assert read(calls) == [CloseSession(session_id="a"), CloseSession(session_id="b")]
    assert calls.get_nowait() is END


def test_the_oldest_hidden_states_are_dropped_first_and_nothing_else() -> None:
    calls = CallQueue(most_feature_bytes=48)
    for call in (chunk("a", 2), CloseSession(session_id="x"), step("b", 2), chunk("c", 2), chunk("d", 3)):
        assert calls.push(call)
        assert calls.feature_bytes <= 48
    # d needs the room of a, which is gone whole, of b, whose step stays, and c keeps its own.
    closed, bare, c, d = read(calls)
    assert closed == CloseSession(session_id="x")
    assert isinstance(bare, StepReport)
    assert bare.session_id == "b" and bare.committed == (1,)
    assert bare.observation is not None and bare.observation.top_ids == ((1,),) and bare.observation.features is None
    assert (c, d) == (chunk("c", 2), chunk("d", 3))
    assert calls.feature_bytes == 0 and calls.dropped == 2


def test_what_is_too_large_by_itself_is_dropped_and_its_step_is_not() -> None:
    calls = CallQueue(most_feature_bytes=8)
    assert calls.push(step("a", 2))
    (only,) = read(calls)
    assert isinstance(only, StepReport) and only.observation is not None and only.observation.features is None


@pytest.mark.parametrize("bounds", [{"most_calls": 1}, {"most_feature_bytes": 8}], ids=["calls", "bytes"])
async def test_whoever_may_wait_waits_for_room(bounds: dict[str, int]) -> None:
    calls = CallQueue(**bounds)
    await calls.put(chunk("a"))
    waiting = asyncio.create_task(calls.put(chunk("b")))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert await calls.get() == chunk("a")
    await waiting
    assert await calls.get() == chunk("b")
    assert calls.dropped == 0


async def test_the_end_comes_after_what_was_said_before_and_an_abandoned_queue_is_empty() -> None:
    calls = CallQueue()
    reading = asyncio.create_task(calls.get())
    await asyncio.sleep(0)
    calls.push(chunk("a"))
    calls.push(chunk("b"))
    calls.end()
    assert [await reading, await calls.get(), await calls.get()] == [chunk("a"), chunk("b"), END]
    calls = CallQueue()
    calls.push(chunk("a"))
    calls.abandon()
    assert await calls.get() is END
    assert calls.feature_bytes == 0
