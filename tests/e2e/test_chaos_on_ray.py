"""A few cells of the chaos matrix on a real local Ray. All of them: ``python -m tests.chaos.matrix --on-ray --out FOLDER``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cells import ALL_ON_RAY, Cell, Plan, plain_answers
from tests.chaos.outcomes import Outcome
from tests.chaos.ray_service import arranged_on_ray
from tests.chaos.users import run_plan

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

# Others are in test_on_ray, test_many_of_each and test_adapters_on_ray.
CELLS = [
    Cell("stage", "killed", "at the end"),
    Cell("verifier", "frozen", "in mid-stream"),
    Cell("controller", "killed", "in mid-stream"),
]


async def test_streams_are_right_or_end_in_one_error(tiny_model: Path) -> None:
    assert set(CELLS) <= set(ALL_ON_RAY)
    expected = await plain_answers(tiny_model)
    async with arranged_on_ray(tiny_model) as arrangement:
        for cell in CELLS:
            outcome = Outcome.of(await run_plan(arrangement, Plan.drawn(cell, arrangement.place, 0), expected))
            assert outcome.right and not outcome.failed, (cell, outcome)
    assert not arrangement.said
