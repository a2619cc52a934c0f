"""A trained draft model: replayed as it is served, exported without what is its target's own, and learnt from again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.model_files.weights.headers import read_shapes
from speculation.errors import ConfigurationError
from tests.drafters.draft_model_sessions import PROMPT, source_of
from tests.running.refusals import refuses
from tests.trainings.training_data import open_tiny
from training.data_manifest import DataManifest, write_manifest
from training.evaluate import tree_taus
from training.export import export_run
from training.learner import trained
from training.open_run import OpenedModel, TrainingTarget, fresh_state
from training.recipe import LayersRecipe, load_recipe
from training.shards import read_shards
from training.snapshots import write_snapshot
from training.vocabulary import write_vocabulary
from training.warm_start import start_from

RECIPE = LayersRecipe(kind="draft_model", layers=(1, 0), frozen_layers=1)


@pytest.fixture
def run(target: Path, data: tuple[Path, DataManifest], tmp_path: Path) -> tuple[Path, OpenedModel]:
    """A run whose parameters have moved."""
    opened, vocabulary = open_tiny(RECIPE, target, *data, size=200)
    parameters = trained(opened.learner.module)
    with torch.no_grad():
        for each in parameters.values():
            each.mul_(1.1)
    folder = tmp_path / "run"
    write_snapshot(folder, fresh_state(opened).model_copy(update={"step": 1}), parameters, {})
    write_manifest(folder, data[1])
    write_vocabulary(folder, vocabulary)
    return folder, opened


def _target(target: Path) -> TrainingTarget:
    return TrainingTarget(folder=target, floats=lambda: target)


def test_only_what_was_trained_is_written(target: Path, run: tuple[Path, OpenedModel], tmp_path: Path) -> None:
    for name, own in (("whole", False), ("own", True)):
        export_run(run[0], _target(target), tmp_path / name, "float32", own_weights=own)
    assert set(read_shapes(tmp_path / "own")) == set(trained(run[1].learner.module))
    left, right = (source_of(target, tmp_path / name).logits_behind(PROMPT, 4) for name in ("own", "whole"))
    assert left.shape == (4, 200) and torch.equal(left, right)
    export_run(run[0], _target(target), tmp_path / "blocks", "int8", own_weights=True)
    blocks = source_of(target, tmp_path / "blocks").logits_behind(PROMPT, 4)
    assert 0 < (blocks - left).abs().max() < 0.05 * left.abs().max()


def test_a_run_can_begin_with_it(
    target: Path, data: tuple[Path, DataManifest], run: tuple[Path, OpenedModel], tmp_path: Path
) -> None:
    export_run(run[0], _target(target), tmp_path / "own", "float32", own_weights=True)
    again, _ = open_tiny(RECIPE, target, *data, size=200)
    start_from(tmp_path / "own", again, target)
    before = trained(run[1].learner.module)
    assert all(torch.equal(each, before[name]) for name, each in trained(again.learner.module).items())


def test_trees_are_replayed_with_it(data: tuple[Path, DataManifest], run: tuple[Path, OpenedModel]) -> None:
    run[1].learner.module.eval()
    held_out = read_shards(data[0], "validation", verify=False)
    greedy, _ = tree_taus(run[1].source(), held_out, (4,), 2)["all"]
    # Its target is the same two layers in another order.
    assert greedy[4] > 1.0


def test_heads_have_no_such_form(target: Path, data: tuple[Path, DataManifest], tmp_path: Path) -> None:
    opened, vocabulary = open_tiny(load_recipe("fspad"), target, *data, size=200)
    folder = tmp_path / "run"
    write_snapshot(folder, fresh_state(opened), trained(opened.learner.module), {})
    write_manifest(folder, data[1])
    write_vocabulary(folder, vocabulary)
    with refuses(ConfigurationError, field="--own-weights"):
        export_run(folder / "step-00000000", _target(target), tmp_path / "out", own_weights=True)
    assert not (tmp_path / "out").exists()
