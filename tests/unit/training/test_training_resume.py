"""A run goes on where it was interrupted, with the same bits; damage and full disks lose nothing that was whole."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speculation.errors import ConfigurationError, ResourceExhausted
from tests.running.refusals import refuses
from tests.trainings.training_data import open_tiny
from training import snapshots
from training.data_manifest import DataManifest
from training.evaluate import quick_score
from training.open_run import fresh_state
from training.recipe import HeadRecipe, load_recipe
from training.shards import Shards, read_shards
from training.snapshots import find_snapshot, newest_whole, read_snapshot
from training.trainer import RunLimits, StepProgress, Trainer

pytestmark = pytest.mark.exhaustive

STEPS = 20
RECIPES = {
    # Unrolled from step 14 on, after the interruption at step 10.
    "fspad": {"batch_rows": 300, "micro_rows": 130, "evaluate_every": 7, "learning_rate": 0.005},
    "streams": {"batch_rows": 300, "micro_rows": 130, "evaluate_every": 7, "learning_rate": 0.02, "stream_layers": 1},
    "medusa": {"batch_rows": 300, "micro_rows": 130, "evaluate_every": 7, "learning_rate": 0.005},
    "eagle3": {
        "batch_rows": 300,
        "micro_rows": 130,
        "evaluate_every": 7,
        "learning_rate": 0.005,
        "state_layers": [-1],
        "unroll_steps": 2,
        "missing_rows": 0.3,
        "top_k_weight": 0.5,
    },
    "block": {
        "batch_rows": 300,
        "micro_rows": 130,
        "evaluate_every": 7,
        "learning_rate": 0.03,
        "state_layers": [-1],
        "block_size": 4,
        "markov_rank": 8,
        "anchors": 0.5,
    },
    "draft_model": {
        "batch_rows": 300,
        "micro_rows": 130,
        "evaluate_every": 7,
        "layers": [1, 0],
        "frozen_layers": 1,
        "prompt_rows": True,
        "state_weight": 0.5,
        "muon_rate": 0.02,
    },
}


@pytest.fixture
def trainer(target: Path, data: tuple[Path, DataManifest]) -> Callable[..., Trainer]:
    folder, manifest = data

    def make(out: Path, recipe: str = "fspad", **changed: object) -> Trainer:
        wanted = load_recipe(recipe, **{"steps": STEPS, **RECIPES[recipe], **changed})
        opened, _ = open_tiny(wanted, target, folder, manifest)
        held_out = read_shards(folder, "validation", verify=False)
        return Trainer(
            opened.learner,
            read_shards(folder, "train", verify=False),
            wanted,
            out,
            fresh_state(opened),
            lambda: quick_score(opened.learner, held_out, 3, 200),
            said.append,
        )

    said: list[str] = []
    make.said = said  # type: ignore[attr-defined]
    return make


def _run(trainer: Trainer, until: int | None = None) -> list[StepProgress]:
    seen: list[StepProgress] = []
    trainer.run(RunLimits(stop=lambda: until is not None and trainer.state.step >= until), seen.append)
    return seen


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = newest_whole(folder)
    assert found is not None
    _, model, optimizer = read_snapshot(found[0])
    return model | {f"optimizer {name}": each for name, each in optimizer.items()}


@pytest.mark.examples(4)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_an_interrupted_run_ends_in_the_same_bits(recipe: str, trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    all_steps = _run(trainer(whole, recipe))
    first = _run(trainer(parts, recipe), until=10)
    resumed = trainer(parts, recipe)
    assert resumed.state.step == 10
    rest = _run(resumed)
    assert [each.step for each in first + rest] == list(range(1, STEPS + 1))
    assert [(each.loss, each.norm, each.validation) for each in first + rest] == [
        (each.loss, each.norm, each.validation) for each in all_steps
    ]
    left, right = _tensors(whole), _tensors(parts)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    # It learns: the mean of the last steps before anything is unrolled against the first ones.
    # Adapters beside frozen layers learn slowly.
    share = 0.97 if recipe == "streams" else 0.9
    assert sum(each.loss for each in all_steps[9:12]) < share * sum(each.loss for each in all_steps[:3])


def test_two_checkpoints_and_the_best_are_kept(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    run = trainer(tmp_path, evaluate_every=2)
    _run(run)
    names = sorted(each.name for each in tmp_path.glob("step-*"))
    best = (tmp_path / "best").read_text()
    assert (tmp_path / "latest").read_text() == f"step-{STEPS:08d}"
    assert set(names) == {f"step-{STEPS:08d}", f"step-{STEPS - 2:08d}", best}
    assert best == f"step-{run.state.best_step:08d}"
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(".*"))


def test_a_run_out_of_time_is_looked_at_once_more(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    run, seen = trainer(tmp_path), list[StepProgress]()
    assert not run.run(RunLimits(deadline=0.0), seen.append)
    assert [(each.step, each.validation is not None) for each in seen] == [(1, True)]
    assert (tmp_path / "best").read_text() == "step-00000001"


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(file: str, trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    _run(trainer(tmp_path, evaluate_every=5), until=10)
    _run(trainer(tmp_path, evaluate_every=5), until=15)
    newest = tmp_path / "step-00000015" / file
    newest.write_bytes(newest.read_bytes()[:-40])
    resumed = trainer(tmp_path, evaluate_every=5)
    assert resumed.state.step == 10
    assert any("step-00000015" in text and "going on from step-00000010" in text for text in trainer.said)  # type: ignore[attr-defined]


def test_data_that_were_made_anew_and_shorter_are_refused(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(trainer(tmp_path), until=2)
    monkeypatch.setattr(Shards, "lengths", property(lambda shards: [20, 20]))
    with refuses(ConfigurationError, says="present epoch has"):
        trainer(tmp_path)


def test_without_held_out_answers_there_is_no_best(target: Path, data: tuple[Path, DataManifest], tmp_path: Path) -> None:
    wanted = load_recipe("fspad", **{**RECIPES["fspad"], "steps": 4, "evaluate_every": 2})
    opened, _ = open_tiny(wanted, target, *data)
    train = read_shards(data[0], "train", verify=False)
    empty = lambda: quick_score(opened.learner, (), 3, 200)  # noqa: E731
    made = Trainer(opened.learner, train, wanted, tmp_path, fresh_state(opened), empty)
    assert [each.validation for each in _run(made)] == [None] * 4
    assert made.state.best_step is None and not (tmp_path / "best").exists()
    assert find_snapshot(tmp_path).name == "step-00000004"


def test_no_whole_checkpoint_is_an_error(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    _run(trainer(tmp_path), until=2)
    for file in tmp_path.glob("step-*/model.safetensors"):
        file.unlink()
    with refuses(ConfigurationError, says="--fresh"):
        trainer(tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(trainer(tmp_path), until=5)
    before = _tensors(tmp_path)

    def full(file: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    with monkeypatch.context() as patched:
        patched.setattr(snapshots, "_write", full)
        with pytest.raises(ResourceExhausted, match=r"No space left on device.*the earlier ones are whole"):
            _run(trainer(tmp_path))
    after = _tensors(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer(tmp_path).state.step == 5


def test_another_recipe_target_or_vocabulary_is_refused(
    trainer: Callable[..., Trainer], target: Path, data: tuple[Path, DataManifest], tmp_path: Path
) -> None:
    _run(trainer(tmp_path), until=2)
    with refuses(ConfigurationError, says="recipe's learning_rate 0.005, not 0.01: give another folder"):
        trainer(tmp_path, learning_rate=0.01)
    # A longer run is the same run.
    assert trainer(tmp_path, steps=STEPS + 5).state.step == 2
    recipe = load_recipe("fspad", steps=STEPS, **RECIPES["fspad"])
    assert isinstance(recipe, HeadRecipe)
    opened, _ = open_tiny(recipe, target, *data, size=200)
    with refuses(ConfigurationError, says="vocabulary"):
        Trainer(opened.learner, read_shards(data[0], "train"), recipe, tmp_path, fresh_state(opened), lambda: 0.0)


def test_data_that_grow_are_read_from_the_next_epoch_on() -> None:
    from training.batches import Place, next_batch

    recipe = load_recipe("fspad", batch_rows=20)
    lengths = [10] * 6
    indices, place = next_batch(Place(), lengths, recipe)
    assert len(indices) == 2 and place == Place(epoch=0, sequences=6, offset=2)
    grown = lengths + [10] * 4
    seen = list(indices)
    for _ in range(2):
        indices, place = next_batch(place, grown, recipe)
        seen += indices
    assert sorted(seen) == list(range(6))
    later: list[int] = []
    for _ in range(5):
        indices, place = next_batch(place, grown, recipe)
        later += indices
    assert sorted(later) == list(range(10)) and place.epoch == 1
