"""A run can begin with the weights of a checkpoint; another shape, target or draft vocabulary is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.drafter.heads.streams.files import load_streams
from services.model_files.weights.headers import SINGLE
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.trainings.training_data import open_tiny
from training.data_manifest import DataManifest, write_manifest
from training.evaluate import quick_score
from training.export import export_run
from training.learner import trained
from training.open_run import OpenedModel, TrainingTarget, fresh_state
from training.recipe import load_recipe
from training.shards import read_shards
from training.snapshots import StartRecord
from training.trainer import RunLimits, Trainer
from training.vocabulary import read_vocabulary, write_vocabulary
from training.warm_start import start_from

pytestmark = pytest.mark.exhaustive

SMALL = {"batch_rows": 300, "micro_rows": 130, "evaluate_every": 2, "learning_rate": 0.005, "steps": 4}
RECIPES: dict[str, dict[str, Any]] = {
    "fspad": {},
    "streams": {"stream_layers": 1},
    "medusa": {},
    "draft_model": {"layers": [0]},
}


@pytest.fixture(scope="module")
def open_model(target: Path, data: tuple[Path, DataManifest]) -> Callable[..., OpenedModel]:
    def opened(recipe: str, size: int = 128, **changed: object) -> OpenedModel:
        return open_tiny(load_recipe(recipe, **{**SMALL, **RECIPES[recipe], **changed}), target, *data, size)[0]

    return opened


@pytest.fixture(scope="module")
def exported(
    target: Path,
    data: tuple[Path, DataManifest],
    open_model: Callable[..., OpenedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def export(recipe: str) -> Path:
        if recipe not in made:
            run = tmp_path_factory.mktemp(recipe)
            _train(open_model(recipe), run, data[0], None)
            where = TrainingTarget(folder=target, floats=lambda: target)
            made[recipe] = run / "export"
            export_run(run, where, made[recipe], "float32")
        return made[recipe]

    return export


def _train(opened: OpenedModel, run: Path, data: Path, start: StartRecord | None) -> Trainer:
    held_out = read_shards(data, "validation", verify=False)
    trainer = Trainer(
        opened.learner,
        read_shards(data, "train", verify=False),
        opened.recipe,
        run,
        fresh_state(opened, start),
        lambda: quick_score(opened.learner, held_out, 3, 200),
    )
    run.mkdir(parents=True, exist_ok=True)
    write_manifest(run, opened.manifest)
    write_vocabulary(run, opened.vocabulary)
    trainer.run(RunLimits(), lambda progress: None)
    return trainer


@pytest.mark.examples(3)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_run_begins_with_the_weights_of_a_checkpoint(
    recipe: str,
    target: Path,
    data: tuple[Path, DataManifest],
    open_model: Callable[..., OpenedModel],
    exported: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = exported(recipe)
    opened, untrained = open_model(recipe), open_model(recipe)
    start = start_from(folder, opened, target)
    held_out = read_shards(data[0], "validation", verify=False)
    record = json.loads((folder / "training.json").read_text())
    assert (start.steps, start.predictions) == (record["steps"], record["predictions"])
    with torch.no_grad():
        assert quick_score(opened.learner, held_out, 3, 200) == pytest.approx(record["validation_score"], abs=1e-6)
    theirs, ours = trained(untrained.learner.module), trained(opened.learner.module)
    assert not all(torch.equal(theirs[name], each) for name, each in ours.items())

    _train(opened, tmp_path / "run", data[0], start)
    export_run(tmp_path / "run", TrainingTarget(folder=target, floats=lambda: target), tmp_path / "second", "float32")
    second = json.loads((tmp_path / "second" / "training.json").read_text())
    assert second["start"] == start.model_dump() and second["steps"] <= 4
    # What both runs together have made is told to the third.
    assert start_from(tmp_path / "second", open_model(recipe), target).steps == start.steps + second["steps"]


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_weights_in_blocks_begin_at_the_numbers_of_the_blocks(
    recipe: str,
    target: Path,
    data: tuple[Path, DataManifest],
    open_model: Callable[..., OpenedModel],
    exported: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    floats = exported(recipe)
    export_run(floats.parent, TrainingTarget(folder=target, floats=lambda: target), tmp_path / "int8", "int8")
    assert not (tmp_path / "int8" / SINGLE).exists()
    # A server may be another user.
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in (tmp_path / "int8").iterdir())
    ours, exact = open_model(recipe), open_model(recipe)
    assert start_from(tmp_path / "int8", ours, target).steps == start_from(floats, exact, target).steps
    wanted = trained(exact.learner.module)
    for name, each in trained(ours.learner.module).items():
        torch.testing.assert_close(each, wanted[name], rtol=0, atol=0.01 * wanted[name].detach().abs().max().item())
    # What it drafts need not be chosen again.
    for folder in (floats, tmp_path / "int8"):
        found = read_vocabulary(folder, data[1])
        assert found.ids.tolist() == ours.vocabulary.ids.tolist() and found.record == ours.vocabulary.record


def test_a_run_that_began_elsewhere_is_not_gone_on_with(
    data: tuple[Path, DataManifest],
    open_model: Callable[..., OpenedModel],
    exported: Callable[[str], Path],
    target: Path,
    tmp_path: Path,
) -> None:
    opened = open_model("fspad")
    _train(opened, tmp_path, data[0], start_from(exported("fspad"), opened, target))
    with refuses(ConfigurationError, says="--fresh"):
        _train(open_model("fspad"), tmp_path, data[0], None)


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"sampler": False}, ("the head's sampler", "true")),
        ({"intermediate_size": 24}, ("the head's intermediate_size", 128)),
        ({"size": 64}, ("the head's draft_vocab_size", 128)),
    ],
)
def test_another_shape_is_refused(
    changed: dict[str, Any],
    refusal: tuple[object, ...],
    open_model: Callable[..., OpenedModel],
    exported: Callable[[str], Path],
    target: Path,
) -> None:
    with refuses(ConfigurationError, *refusal):
        start_from(exported("fspad"), open_model("fspad", **changed), target)


def test_an_early_exit_that_a_checkpoint_lacks_begins_untrained(
    open_model: Callable[..., OpenedModel], exported: Callable[[str], Path], target: Path
) -> None:
    opened, untrained = open_model("streams", pruning_rank=4), open_model("streams", pruning_rank=4)
    start_from(exported("streams"), opened, target)
    ours, theirs = trained(opened.learner.module), trained(untrained.learner.module)
    same = {name for name, each in ours.items() if torch.equal(each, theirs[name])}
    assert {name for name in ours if name.startswith("pruning.")} <= same
    assert "stream_embeddings" not in same


def test_an_early_exit_is_trained_alone(
    open_model: Callable[..., OpenedModel],
    exported: Callable[[str], Path],
    target: Path,
    data: tuple[Path, DataManifest],
    tmp_path: Path,
) -> None:
    opened = open_model("streams", pruning_rank=4, pruning_alone=True)
    start = start_from(exported("streams"), opened, target)
    before = {name: each.detach().clone() for name, each in trained(opened.learner.module).items()}
    _train(opened, tmp_path / "run", data[0], start)
    changed = {name for name, each in trained(opened.learner.module).items() if not torch.equal(each, before[name])}
    assert changed == {"pruning.lora_A.weight", "pruning.lora_B.weight"}
    # The export holds both.
    export_run(tmp_path / "run", TrainingTarget(folder=target, floats=lambda: target), tmp_path / "out", "float32")
    streams = load_streams(tmp_path / "out", target)
    assert torch.equal(streams.stream_embeddings, before["stream_embeddings"])
    assert streams.pruning is not None and streams.pruning.lora_B.weight.any()


def test_other_layers_are_refused(
    open_model: Callable[..., OpenedModel], exported: Callable[[str], Path], target: Path
) -> None:
    for layers in ([0, 1], [1]):
        with refuses(ConfigurationError, "--start-from", says="layers [0]", allowed=f"{layers}, by the recipe"):
            start_from(exported("draft_model"), open_model("draft_model", layers=layers), target)


def test_weights_that_would_be_lost_are_refused(
    open_model: Callable[..., OpenedModel], target: Path, tmp_path: Path
) -> None:
    both = {"layers": [0, 1]}
    trained_both = open_model("draft_model", **both)
    recorded = {"recipe": trained_both.recipe.model_dump(mode="json")}
    tensors = {name: each.detach().clone().contiguous() for name, each in trained_both.learner.module.state_dict().items()}
    tensors.pop("lm_head.weight", None)
    (tmp_path / "config.json").write_bytes((target / "config.json").read_bytes())

    def start(record: dict[str, Any], changed: dict[str, torch.Tensor], **recipe: Any) -> None:
        save_file({**tensors, **changed}, tmp_path / SINGLE)
        (tmp_path / "training.json").write_text(json.dumps(record))
        start_from(tmp_path, open_model("draft_model", **both, **recipe), target)

    start(recorded, {})
    with refuses(
        ConfigurationError,
        field="its frozen_layers",
        value=0,
        allowed="at least the recipe's, or trained layers would be lost",
    ):
        start(recorded, {}, frozen_layers=1)
    # Without a record, the numbers tell.
    name = "model.layers.0.mlp.up_proj.weight"
    start({}, {name: tensors[name].bfloat16().float()}, frozen_layers=1)
    with refuses(ConfigurationError, "--start-from", tmp_path, f"the tensor {name} is not the target's"):
        start({}, {name: 1.1 * tensors[name]}, frozen_layers=1)
    with refuses(ConfigurationError, field="--start-from", says="has the tensor model.layers.2."):
        start({}, {"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)})


def test_another_target_and_what_is_no_checkpoint_are_refused(
    open_model: Callable[..., OpenedModel], exported: Callable[[str], Path], target: Path, tmp_path: Path
) -> None:
    with refuses(ConfigurationError, field="--start-from", allowed="a folder of outrider train export"):
        start_from(tmp_path, open_model("fspad"), target)
    other = tmp_path / "other"
    other.mkdir()
    for file in exported("fspad").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    record = json.loads((other / "training.json").read_text())
    (other / "training.json").write_text(json.dumps(record | {"target_weights_sha256": "f" * 64}))
    with refuses(ConfigurationError, field="--start-from", value="other"):
        start_from(other, open_model("fspad"), target)
