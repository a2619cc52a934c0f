"""The block recipe: what it learns is what is drafted, it learns, and both layouts serve and pass the canary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.drafter.heads.blocks.drafter import BlockDrafter
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.blocks.source import BlockSource
from services.drafter.heads.blocks.whole_texts import blocks_of
from services.drafter.heads.canary.texts import layers_to_record, record_texts
from services.drafter.heads.canary.trial import open_trial
from services.drafter.heads.canary.verdict import USELESS
from services.drafter.heads.files.target_rows import read_target_shape
from speculation import limits
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.trainings.recipe_runs import exported, smoke_run
from tests.trainings.training_data import open_tiny
from training.block_writing import BlockLayout
from training.data_manifest import DataManifest
from training.export import export_run
from training.learner import trained
from training.losses import output_rows
from training.open_run import OpenedModel, TrainingTarget
from training.recipe import load_recipe
from training.shards import read_shards
from training.tree_replay import passes_of
from training.warm_start import start_from

pytestmark = pytest.mark.exhaustive

# The state behind the final norm is one of those that it reads.
LAYERS = (1, -1)
SMALL = {
    "state_layers": LAYERS,
    "steps": 60,
    "batch_rows": 600,
    "micro_rows": 300,
    "learning_rate": 0.03,
    "precision": "float32",
    "block_size": 4,
    "markov_rank": 8,
    "anchors": 1.0,
}

# A plain DFlash: without heads on its rows, which see each other.
PLAIN = {"markov_rank": 0, "causal": False, "divergence": "lk", "muon_rate": 0.01}


def opened(target: Path, data: tuple[Path, DataManifest], **changed: object) -> OpenedModel:
    return open_tiny(load_recipe("block", **{**SMALL, **changed}), target, *data)[0]


@pytest.mark.parametrize("form", [{"markov_head": "vanilla"}, {"markov_head": "gated"}, PLAIN], ids=str)
def test_what_is_learnt_is_what_is_drafted(
    form: dict[str, Any], deep_target: Path, deep_data: tuple[Path, DataManifest]
) -> None:
    model = opened(deep_target, deep_data, **form)
    drafter = model.learner.module
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.config.markov_rank, drafter.config.levels) == ((0, 3) if form is PLAIN else (8, 4))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    check_same(model, drafter, deep_data)


def check_same(model: OpenedModel, drafter: BlockDrafter, data: tuple[Path, DataManifest]) -> None:
    """Check that the learner predicts what the drafter says."""
    sequence = next(iter(read_shards(data[0], "train", layers=model.columns.layers)))
    rank, levels = drafter.config.markov_rank, drafter.config.levels
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    states = torch.from_numpy(sequence.states.astype(np.float32))[:, model.columns.read]
    everywhere = torch.arange(len(tokens))
    with torch.no_grad():
        learnt = list(model.learner.predict([sequence], 4))
        hidden = blocks_of(drafter, tokens[None], states[None], everywhere[None])[0]
    assert len(learnt) == levels
    for level, prediction in enumerate(learnt):
        at = everywhere[sequence.prompt_length - 1 : len(tokens) - 2 - level]
        rows = hidden[at, level]
        with torch.no_grad():
            logits = drafter.logits(rows, drafter.vocabulary)
            expected, _ = drafter.corrected(logits, rows, tokens[at + 1 + level], torch.full_like(at, level), rows[:, :0])
            found = prediction.hidden @ output_rows(model.learner.rows, model.learner.own_rows, 64 + rank).T
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_confidence_learns_beside_the_rest(deep_target: Path, deep_data: tuple[Path, DataManifest]) -> None:
    """Its loss is near where it says the share that is accepted, and leaves all other gradients alone."""
    gradients = []
    for weight in (0.0, 5.0):
        model = opened(deep_target, deep_data, confidence_weight=weight)
        sequences = list(read_shards(deep_data[0], "train", layers=model.columns.layers))[:4]
        tally = model.learner.lose(sequences, np.random.default_rng(0), 0.0)
        tally.loss.backward()  # type: ignore[no-untyped-call]
        assert tally.parts.keys() == {"divergence", "confidence"} and min(tally.parts.values()) > 0
        found = {name: each.grad for name, each in trained(model.learner.module).items()}
        gradients.append({name: each for name, each in found.items() if not name.startswith("confidence_head.")})
        assert found["confidence_head.proj.weight"] is not None
        assert bool(found["confidence_head.proj.weight"].any()) == (weight > 0)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=0)


Run = Callable[[bool], Path]


@pytest.fixture(scope="module")
def run_of(deep_target: Path, deep_data: tuple[Path, DataManifest], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The folder of a run, with DSpark's heads or without."""

    @cache
    def of(plain: bool) -> Path:
        folder = tmp_path_factory.mktemp("trained") / "run"
        found = smoke_run(opened(deep_target, deep_data, **(PLAIN if plain else {})), deep_data, folder)
        assert sum(found.losses[-5:]) < 0.7 * sum(found.losses[:5])
        assert found.after - 1 > 1.5 * (found.before - 1)
        return folder

    return of


@pytest.fixture
def run(run_of: Run) -> Path:
    return run_of(False)


@pytest.mark.parametrize("plain", [False, True], ids=["DSpark", "DFlash"])
@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_what_is_exported_drafts(
    layout: BlockLayout, plain: bool, run_of: Run, deep_target: Path, deep_data: tuple[Path, DataManifest], tmp_path: Path
) -> None:
    folder = exported(run_of(plain), deep_target, tmp_path / "out", layout)
    drafter = load_blocks(folder, deep_target)
    learnt = opened(deep_target, deep_data, **(PLAIN if plain else {}))
    assert drafter.config == learnt.learner.module.config
    start_from(folder, learnt, deep_target)
    check_same(learnt, drafter, deep_data)
    sequences = list(read_shards(deep_data[0], "train", layers=LAYERS))[:8]
    tokens = sum(len(each.tokens) - each.prompt_length - 1 for each in sequences)
    passes = sum(passes_of(BlockSource(drafter, window=512), sequences, 4, LAYERS))
    # Four nodes at random out of 128 tokens would save three passes of a hundred.
    assert passes < 0.93 * tokens, (passes, tokens)
    model = AutoModelForCausalLM.from_pretrained(deep_target)
    trial = open_trial(folder, deep_target)
    # A random target's text says nothing about its other text: the prompts are those that were learnt.
    prompts = [each.tokens[: each.prompt_length].tolist() for each in read_shards(deep_data[0], "train")][:8]
    texts = record_texts(model, prompts, layers_to_record(trial.layers, read_target_shape(deep_target)), 24)
    found = trial.check(texts)
    assert found.first > USELESS and found.likely_fault is None
    fields = json.loads((folder / "config.json").read_text())
    assert fields["draft_vocab_size"] == 128 and fields["is_causal"] is not plain
    assert fields["sample_from_anchor"] is not plain and ("markov_rank" in fields) is not plain
    named = {"authors": ("Qwen3DSparkModel", "DFlashDraftModel"), "speculators": ("DSparkSpeculator", "DFlashSpeculator")}
    assert fields["architectures"] == [named[layout][plain]]
    assert fields.get("speculators_model_type") in (None, ("dspark", "dflash")[plain])


def test_a_run_can_begin_with_it(run: Path, deep_target: Path, deep_data: tuple[Path, DataManifest], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export_run(run, TrainingTarget(folder=deep_target, floats=lambda: deep_target), folder, "int8")
    model = opened(deep_target, deep_data)
    assert start_from(folder, model, deep_target).steps == SMALL["steps"]
    loaded = load_blocks(folder, deep_target)
    assert asdict(loaded.config) == asdict(model.learner.module.config)
    for name, parameter in trained(model.learner.module).items():
        torch.testing.assert_close(parameter.detach(), loaded.state_dict()[name], rtol=0, atol=0)


def test_what_no_library_reads_is_not_exported(run: Path, deep_target: Path, tmp_path: Path) -> None:
    target = TrainingTarget(folder=deep_target, floats=lambda: deep_target)
    with refuses(ConfigurationError, field="--dtype", value="int8"):
        export_run(run, target, tmp_path / "out", "int8", layout="speculators")
    assert not (tmp_path / "out").exists()


def test_wrong_combinations_are_refused(deep_target: Path, deep_data: tuple[Path, DataManifest]) -> None:
    with refuses(ConfigurationError, says="block_size"):
        opened(deep_target, deep_data, block_size=limits.MAX_TREE_NODES + 1)
    with refuses(ConfigurationError, field="the recipe's mask_token_id", value=99999):
        opened(deep_target, deep_data, mask_token_id=99999)
    with refuses(ConfigurationError, says="unroll_steps"):
        opened(deep_target, deep_data, unroll_steps=2)
    with refuses(ConfigurationError, says="markov_rank is 0"):
        opened(deep_target, deep_data, markov_rank=0, markov_head="gated")
