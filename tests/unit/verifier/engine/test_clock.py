"""The engine's clock: as exact under uvloop, which serves on Ray, as under asyncio's own event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from services.verifier.engine.clock import now
from tests.engine.simulated import JumpingLoop


def _compute() -> None:
    time.sleep(0.0002)


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_goes_on_while_a_callback_runs(make: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def three() -> list[float]:
        found = []
        for _ in range(3):
            found.append(now())
            _compute()
        return found

    with asyncio.Runner(loop_factory=make) as runner:
        first, second, third = runner.run(three())
    assert second - first >= 0.0002
    assert third - second >= 0.0002


def test_a_simulated_loop_keeps_its_own_clock() -> None:
    async def slept() -> float:
        began = now()
        await asyncio.sleep(1000.0)
        return now() - began

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(slept()) == pytest.approx(1000.0)
