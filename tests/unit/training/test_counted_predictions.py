"""Which predictions a loss counts: those whose token, the text's or the target's likeliest, can be drafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainings.training_data import open_tiny
from training.batches import randomness
from training.data_manifest import DataManifest
from training.recipe import load_recipe
from training.shards import TrainingSequence, read_shards

RECIPES = {"fspad": {"answer_only": 0.0, "unroll_from": 1.0}, "draft_model": {"layers": [0]}}
SIZE = 150


@pytest.fixture(scope="module")
def sampled(data: tuple[Path, DataManifest]) -> list[TrainingSequence]:
    """Answers whose tokens are not the likeliest ones."""
    random = np.random.default_rng(3)
    return [
        replace(each, tokens=random.integers(4, 320, len(each.tokens)).astype(np.int32), temperature=1.0)
        for each in list(read_shards(data[0], "train", verify=False))[:5]
    ]


@pytest.mark.examples(6)
@pytest.mark.parametrize("kind", list(RECIPES))
@pytest.mark.parametrize("counted", ["text", "likeliest"])
def test_as_the_recipe_says(
    kind: str, counted: str, target: Path, data: tuple[Path, DataManifest], sampled: list[TrainingSequence]
) -> None:
    recipe = load_recipe(kind, counted=counted, **RECIPES[kind])
    opened, vocabulary = open_tiny(recipe, target, *data, size=SIZE)
    expected = 0
    for each in sampled:
        # Position p predicts token p + 1; the answer's first token is the target's, from the pass over the prompt.
        places = np.arange(each.prompt_length, len(each.tokens) - 1)
        places = places[each.known[places]]
        likeliest = (torch.from_numpy(each.states[places].astype(np.float32)) @ opened.output.T).argmax(-1).numpy()
        told = each.tokens[places + 1] if counted == "text" else likeliest
        expected += int(np.isin(told, vocabulary.ids).sum())
    tally = opened.learner.lose(sampled, randomness(recipe, 0, 0), 0.0)
    assert tally.rows == expected
    assert bool(torch.isfinite(tally.loss))


def test_with_the_whole_vocabulary_all_count_in_every_step(
    target: Path, data: tuple[Path, DataManifest], sampled: list[TrainingSequence]
) -> None:
    losses = []
    for counted in ("text", "likeliest"):
        recipe = load_recipe("fspad", counted=counted, unroll_from=0.0)
        opened, _ = open_tiny(recipe, target, *data, size=data[1].target.vocab_size)
        losses.append(opened.learner.lose(sampled, randomness(recipe, 0, 0), 0.5).loss.item())
    assert losses[0] == losses[1] > 0


def test_prompts_count_where_the_recipe_says_so(
    target: Path, data: tuple[Path, DataManifest], sampled: list[TrainingSequence]
) -> None:
    counted = {}
    for prompts in (False, True):
        recipe = load_recipe("draft_model", layers=[0], prompt_rows=prompts)
        opened, _ = open_tiny(recipe, target, *data, size=data[1].target.vocab_size)
        counted[prompts] = opened.learner.lose(sampled, randomness(recipe, 0, 0), 0.0).rows
        # What is measured are answers.
        (measured,) = opened.learner.predict(sampled, 1)
        assert len(measured.hidden) == sum(len(each.tokens) - 1 - each.prompt_length for each in sampled)
    assert counted[True] - counted[False] == sum(each.prompt_length for each in sampled)


def test_what_the_output_layer_reads_counts_with_its_weight(
    target: Path, data: tuple[Path, DataManifest], sampled: list[TrainingSequence]
) -> None:
    losses = []
    for weight in (0.0, 1.0, 3.0):
        recipe = load_recipe("draft_model", layers=[0], state_weight=weight)
        opened, _ = open_tiny(recipe, target, *data, size=SIZE)
        tally = opened.learner.lose(sampled, randomness(recipe, 0, 0), 0.0)
        losses.append(float(tally.loss.detach()))
        # What it is made of is told where it is made of two things.
        told = {"divergence": losses[0], "states": (losses[-1] - losses[0]) / (weight or 1)} if weight else {}
        assert tally.parts == pytest.approx(told, rel=1e-3)
    assert losses[2] - losses[0] == pytest.approx(3 * (losses[1] - losses[0]), rel=1e-3) and losses[1] > losses[0]
