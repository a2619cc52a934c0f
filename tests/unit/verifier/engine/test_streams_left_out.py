"""Streams that do not pay: once the budget leaves them out, passes hold no row and read no state for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from typing_extensions import override

from services.verifier.engine.deciding.costly_sources import CostlySources
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import LoopStats
from services.verifier.model.target_port import Rows, StreamSpec
from speculation.types import Plan
from tests.engine.fakes import ToyTarget
from tests.engine.simulated import run
from tests.unit.verifier.engine.test_costly_sources import Service, World

STREAMS = StreamSpec(rows=4, share=0.2, most_rows=128)
LAYERS = (23, 30, 31, 32, 33)
PLAN = Plan(strategy="blend", sources=("suffix", "streaming"), max_nodes=6, observe_layers=LAYERS, observe_prompt=True)
ANSWERS, TOKENS = 20, 150


class Counted(ToyTarget):
    """A target with streams, which counts what each request's passes hold for them."""

    def __init__(self) -> None:
        super().__init__()
        self.stream_rows: Counter[str] = Counter()
        self.passes_with_states: Counter[str] = Counter()

    @override
    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        return STREAMS if 30 in layers else None

    @override
    def begin(self, batch: Sequence[Rows]) -> None:
        super().begin(batch)
        for rows in batch:
            self.stream_rows[rows.request_id] += STREAMS.rows * len(rows.ends)
            self.passes_with_states[rows.request_id] += bool(rows.layers)


async def answered() -> tuple[Counted, World, LoopStats]:
    """What requests are served one after the other with streams that are always wrong."""
    target, world = Counted(), World(slower=0.3, draft_s=0.004, right=0, text=2, model="streaming")
    service = Service(world, target)
    await service.loop.start()
    try:
        await service.took(ANSWERS, PLAN, TOKENS)
    finally:
        await service.loop.stop()
    return target, world, service.loop.stats


def test_requests_without_streams_hold_no_row_and_read_no_state() -> None:
    target, world, stats = run(answered())
    trials = [number for number, sources in enumerate(world.opened, 1) if "streaming" in sources]
    with_rows = {name for name, count in target.stream_rows.items() if count}
    # The first request and one of the next sixteen; the request is opened anew where they are given up.
    assert len(with_rows) == 2 == stats.source_choices["streaming"]["trial"] and trials[0] == 1
    assert with_rows == {name for name, count in target.passes_with_states.items() if count}
    assert stats.stream_rows == pytest.approx(STREAMS.share * sum(target.stream_rows.values()))
    # A trial ends after few steps.
    most_steps = 24
    assert all(0 < target.stream_rows[name] <= 3 * STREAMS.rows * most_steps for name in with_rows)
    assert all(target.passes_with_states[name] <= most_steps + 2 for name in with_rows)
    assert 0 < stats.rows_observed < stats.rows
    assert world.drafts <= 2 * most_steps


@pytest.mark.exhaustive
def test_a_budget_that_leaves_nothing_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: CostlySources, live: LiveRequest, requests: int) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(CostlySources, "given_up", keep)
    with pytest.raises(AssertionError):
        test_requests_without_streams_hold_no_row_and_read_no_state()
