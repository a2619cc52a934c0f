"""Smoke runs of recipes on a tiny target: some steps, then what was exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from training.block_writing import BlockLayout
from training.data_manifest import DataManifest, write_manifest
from training.evaluate import quick_score
from training.export import export_run
from training.open_run import OpenedModel, TrainingTarget, fresh_state
from training.shards import read_shards
from training.trainer import RunLimits, Trainer
from training.vocabulary import write_vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeRun:
    """What a run gave.

    Attributes:
        losses: of its steps.
        before: the score of the untrained model on the answers that it then learnt.
        after: the same behind the last step.
    """

    losses: list[float]
    before: float
    after: float


def smoke_run(model: OpenedModel, data: tuple[Path, DataManifest], run: Path) -> SmokeRun:
    """Train all steps of the recipe. The scores are tokens per pass of a chain of two."""
    shards = read_shards(data[0], "train", verify=False, layers=model.columns.layers)

    def score() -> float:
        with torch.no_grad():
            found = quick_score(model.learner, shards, 1, 600)
        assert found is not None
        return found

    before, losses = score(), list[float]()
    trainer = Trainer(model.learner, shards, model.recipe, run, fresh_state(model), score)
    run.mkdir(exist_ok=True)
    write_manifest(run, model.manifest)
    write_vocabulary(run, model.vocabulary)
    trainer.run(RunLimits(), lambda progress: losses.append(progress.loss))
    return SmokeRun(losses=losses, before=before, after=score())


def exported(run: Path, target: Path, out: Path, layout: BlockLayout | None = None) -> Path:
    """The drafter of a run, as floats."""
    export_run(run, TrainingTarget(folder=target, floats=lambda: target), out, "float32", layout=layout)
    return out
