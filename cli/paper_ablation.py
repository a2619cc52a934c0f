"""The training runs that ``outrider paper fspad --ablation`` names, read from their folders."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from benchmarks.papers.trained_runs import TrainedRun
    from cluster.models.target import ResolvedModel
    from training.snapshots import RunState


def trained_runs(folders: Sequence[Path], model: ResolvedModel, exports: Path) -> list[TrainedRun]:
    """The runs, which belong together.

    Args:
        exports: their heads are written into this folder when they are asked for.

    Raises:
        ConfigurationError: a folder holds no run, one that is not done or is of another kind of drafter or target, or runs
            that do not belong together; names it.
    """
    from benchmarks.papers.trained_runs import check_together
    from training.data_folder import weights_digest

    if not folders:
        return []
    target = weights_digest(model.path)
    runs = [_read(folder, model, target, exports) for folder in folders]
    check_together(runs)
    return runs


def _read(folder: Path, model: ResolvedModel, target: str, exports: Path) -> TrainedRun:
    from benchmarks.papers.trained_runs import TrainedRun
    from training.curves import acceptance_curve, loss_curves
    from training.data_manifest import read_data_manifest
    from training.snapshots import MODEL, find_snapshot, newest_whole, read_snapshot

    newest = newest_whole(folder)
    if newest is None:
        raise _refused(folder, "it holds no run of outrider train run")
    last, _, _ = read_snapshot(newest[0])
    snapshot = find_snapshot(folder)
    best, _, _ = read_snapshot(snapshot)
    _check(folder, last, model, target)
    manifest = read_data_manifest(folder)
    run = TrainedRun(
        folder=folder,
        recipe=last.recipe,
        origin={
            "data": hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:12],
            "vocabulary": last.vocabulary[:12],
            "beginning": "an untrained head" if last.start is None else last.start.weights_sha256[:12],
        },
        answers=sum(shard.sequences for shard in manifest.shards),
        tokens=sum(shard.answer_tokens for shard in manifest.shards),
        predictions=last.rows,
        weights=best.sha256[MODEL][:16],
        held_out=best.best_score,
        accepted=_accepted(snapshot),
        losses=loss_curves(folder, last.step) or {},
        acceptance=acceptance_curve(folder, last.step) or {},
        head=lambda: _exported(run, model, exports),
    )
    return run


def _check(folder: Path, last: RunState, model: ResolvedModel, target: str) -> None:
    if (kind := last.recipe["kind"]) != "head":
        raise _refused(folder, f"it is a run of the kind {kind}: must be head, as EAGLE's and FSPAD's are")
    if last.target != target:
        raise _refused(folder, f"it is of a target with the hash {last.target[:12]}, and {model.name} has {target[:12]}")
    if last.step < (steps := last.recipe["steps"]):
        raise _refused(
            folder, f"it has made {last.step:,} of its {steps:,} steps: go on with outrider train run, or leave it out"
        )


def _refused(folder: Path, why: str) -> ConfigurationError:
    from benchmarks.papers.trained_runs import OPTION

    return ConfigurationError(why, field=OPTION, verb="", value=folder)


def _accepted(snapshot: Path) -> float | None:
    """The chance that the first draft is accepted, of ``outrider train evaluate``; None: it was not measured."""
    from services.model_files.folder import read_json
    from training.export import EVALUATION

    if not (snapshot / EVALUATION).is_file():
        return None
    record: Any = read_json(snapshot / EVALUATION, of="head")
    return float(record["domains"]["all"]["overlap"][0])


def _exported(run: TrainedRun, model: ResolvedModel, exports: Path) -> Path:
    from training.export import export_run
    from training.open_run import TrainingTarget

    folder = exports / f"{run.name}-{run.weights}"
    if not (folder / "config.json").is_file():
        export_run(run.folder, TrainingTarget(folder=model.path, floats=lambda: model.path), folder)
    return folder
