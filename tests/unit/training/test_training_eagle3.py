"""EAGLE-3's recipe: what it learns is what is drafted, it learns, and what it exports serves and passes the canary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.drafter.heads.canary.texts import layers_to_record, record_texts
from services.drafter.heads.canary.trial import open_trial
from services.drafter.heads.canary.verdict import USELESS
from services.drafter.heads.eagle.head import causal
from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.files.target_rows import read_target_shape
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.trainings.recipe_runs import exported, smoke_run
from tests.trainings.training_data import make_tiny_data, open_tiny
from training.data_manifest import DataManifest
from training.open_run import OpenedModel
from training.recipe import load_recipe
from training.shards import read_shards
from training.tree_replay import passes_of

pytestmark = pytest.mark.exhaustive

LAYERS = (0, 1, 2)
SMALL = {
    "state_layers": LAYERS,
    "steps": 50,
    "batch_rows": 600,
    "micro_rows": 300,
    "learning_rate": 0.01,
    "unroll_steps": 3,
    "precision": "float32",
}


def opened(target: Path, data: tuple[Path, DataManifest], **changed: object) -> OpenedModel:
    return open_tiny(load_recipe("eagle3", **{**SMALL, **changed}), target, *data)[0]


def test_what_is_learnt_is_what_is_drafted(deep_target: Path, deep_data: tuple[Path, DataManifest]) -> None:
    model = opened(deep_target, deep_data)
    head = model.learner.module
    sequence = next(iter(read_shards(deep_data[0], "train", layers=model.columns.layers)))
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    states = torch.from_numpy(sequence.states.astype(np.float32))[:, model.columns.read]
    with torch.no_grad():
        learnt = list(model.learner.predict([sequence], 3))
        for at in (sequence.prompt_length - 1, 20, 30):
            read = head.fuse(states[: at + 1])
            for step, prediction in enumerate(learnt):
                count = at + 1 + step
                made = head(head.embed(tokens[1 : count + 1])[None], read[None], torch.arange(count)[None], causal)
                place = at - sequence.prompt_length + 1
                torch.testing.assert_close(prediction.hidden[place], made.hidden[0, -1], rtol=1e-4, atol=1e-4)
                # What is fed back is not fused again.
                read = torch.cat((read, made.state[0, -1:]))


@pytest.fixture(scope="module")
def drafter(deep_target: Path, deep_data: tuple[Path, DataManifest], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    found = smoke_run(opened(deep_target, deep_data), deep_data, folder / "run")
    assert sum(found.losses[-5:]) < 0.7 * sum(found.losses[:5])
    assert found.after - 1 > 1.5 * (found.before - 1)
    return exported(folder / "run", deep_target, folder / "out")


def test_what_is_exported_drafts(drafter: Path, deep_target: Path, deep_data: tuple[Path, DataManifest]) -> None:
    head = load_head(drafter, deep_target)
    assert head.config.family == "eagle3" and head.config.state_layers == LAYERS
    assert head.config.own_output and head.config.draft_vocab_size == 128
    sequences = list(read_shards(deep_data[0], "train", layers=LAYERS))[:8]
    tokens = sum(len(each.tokens) - each.prompt_length - 1 for each in sequences)
    passes = sum(passes_of(FeatureSource("eagle3", head, window=512), sequences, 4, LAYERS))
    # Four nodes at random out of 128 tokens would save three passes of a hundred.
    assert passes < 0.8 * tokens, (passes, tokens)


def test_the_canary_finds_nothing(drafter: Path, deep_target: Path, deep_data: tuple[Path, DataManifest]) -> None:
    model = AutoModelForCausalLM.from_pretrained(deep_target)
    trial = open_trial(drafter, deep_target)
    # A random target's text says nothing about its other text: the prompts are those that were learnt.
    prompts = [each.tokens[: each.prompt_length].tolist() for each in read_shards(deep_data[0], "train")][:8]
    texts = record_texts(model, prompts, layers_to_record(trial.layers, read_target_shape(deep_target)), 24)
    found = trial.check(texts)
    assert found.first > 2 * USELESS and found.likely_fault is None


def test_wrong_combinations_are_refused(deep_target: Path, deep_data: tuple[Path, DataManifest], tmp_path: Path) -> None:
    with refuses(ConfigurationError, says="unknown key sampler"):
        opened(deep_target, deep_data, sampler=True)
    with refuses(ConfigurationError, field="the recipe's state_layers", value=[0, 3]):
        opened(deep_target, deep_data, state_layers=(0, 3))
    with refuses(ConfigurationError, field="the recipe's state_layers", value=[1, 1, 0]):
        opened(deep_target, deep_data, state_layers=(1, 1, 0))
    with refuses(ConfigurationError, field="the recipe's top_k", value=200, says="at most 128"):
        opened(deep_target, deep_data, top_k=200, top_k_weight=1.0)
    plain = tmp_path / "plain"
    manifest = make_tiny_data(deep_target, plain, sequences=12)
    with refuses(ConfigurationError, field="the layers of its states", value=[-1], says="--layers 0,1,2,-1"):
        opened(deep_target, (plain, manifest))
