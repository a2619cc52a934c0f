"""What the table of costs learns from passes beside which drafts are made: how long a pass takes without."""

from __future__ import annotations

import random

import pytest

from services.verifier.engine.deciding.draft_costs import DraftCosts
from services.verifier.engine.deciding.lessons import teach
from services.verifier.engine.passes import PassSize
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load

PASS_S, LONGER, REQUESTS = 0.02, 0.15, 8


def plain_share(*, told: bool, quiet_every: int = 16) -> float:
    """What a pass without drafts is taken to last, over what it lasts, after passes that most had drafts made beside them.

    Args:
        told: whether the table is told how many of a pass's seconds are the drafts'.
        quiet_every: one pass in so many goes without drafts.
    """
    table = CostTable(by_rows={1: 0.012, REQUESTS: PASS_S, 2 * REQUESTS: 0.04}, per_request=0.0, per_key=0.0)
    budget, costs, numbers = MeasuredBudget(table, max_nodes=8), DraftCosts(["the drafter"]), random.Random(1)
    load = Load(rows=REQUESTS, requests=REQUESTS, keys=0)
    size = PassSize(
        parts=REQUESTS, named=0, rows=REQUESTS, stream_rows=0.0, observed_rows=0, prompts=False, load=load
    )  # fmt: skip
    for number in range(1500):
        busy = {"the drafter": [False] * REQUESTS if number % quiet_every else []}
        seconds = PASS_S * (1 + LONGER * bool(busy["the drafter"])) * (1 + numbers.gauss(0, 0.02))
        # As the loop does after each pass.
        costs.learn(size, busy, seconds, budget.seconds(load))
        teach(budget, [], size, seconds, slowed_s=costs.slowed_s(busy) if told else 0.0)
    return budget.seconds(load) / PASS_S


@pytest.mark.parametrize("quiet_every", [4, 16, 32])
def test_plain_decoding_is_not_learnt_from_passes_that_drafts_made_longer(quiet_every: int) -> None:
    assert plain_share(told=True, quiet_every=quiet_every) == pytest.approx(1.0, rel=0.05)


def test_without_knowing_what_drafts_took_it_would_be() -> None:
    assert plain_share(told=False) > 1.1
