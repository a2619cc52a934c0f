"""Drafters of recipes that were trained a little change no token: some of what they guess is right, and some is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lossless.test_heads_are_lossless import ANSWER, drafted
from tests.lossless.test_strategies import plain_answers, plan_of, verifier
from tests.tiny_models.tiny import make_tiny_model
from tests.trainings.recipe_runs import exported, smoke_run
from tests.trainings.training_data import make_tiny_data, open_tiny
from training.recipe import load_recipe

pytestmark = pytest.mark.exhaustive

SMALL = {"state_layers": (0, 1, -1), "steps": 15, "batch_rows": 400, "micro_rows": 400, "learning_rate": 0.01}
RECIPES = {
    "eagle3": {"unroll_steps": 2, "missing_rows": 0.3},
    "block": {"block_size": 4, "markov_rank": 8, "anchors": 1.0},
}


@pytest.mark.parametrize(("recipe", "source"), [("eagle3", "eagle3"), ("block", "dflash")])
async def test_no_token_changes(recipe: str, source: str, tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", num_hidden_layers=3)
    manifest = make_tiny_data(target, tmp_path / "data", sequences=16, layers=(0, 1, -1))
    wanted = load_recipe(recipe, **{**SMALL, **RECIPES[recipe], "precision": "float32"})
    model, _ = open_tiny(wanted, target, tmp_path / "data", manifest)
    smoke_run(model, (tmp_path / "data", manifest), tmp_path / "run")
    folder = exported(tmp_path / "run", target, tmp_path / "out")
    async with verifier(target, "real", "grpc", "fixed", draft_deadline_s=5.0, instead={source: folder}) as running:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}):
            expected = [tokens[:ANSWER] for tokens in await plain_answers(target, sampling)]
            for sources in ((source,), ("suffix", "recycling", source)):
                assert await drafted(running, plan_of(sources), sampling) == expected, sources
