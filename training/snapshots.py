"""Checkpoints of a training run: written whole or not at all, found again after any interruption.

A run's folder holds ``step-N`` folders with ``model.safetensors``, ``optimizer.safetensors`` and ``state.json``, and the
files ``latest`` and ``best``, which name one of them. The last two and the best are kept. There are no random generators to
save: every random number follows from the recipe's seed and the step (training/batches.py).

By hand: trainers' checkpoints are pickles.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from speculation.errors import ConfigurationError, OutriderError, ResourceExhausted
from speculation.files import write_whole
from training.curves import LOG

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
LATEST, BEST = "latest", "best"
_KEPT = 2


class StartRecord(BaseModel):
    """The checkpoint that a run began from.

    Attributes:
        weights_sha256: of its model.safetensors.
        steps, predictions: that it had been trained for, as far as it says so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights_sha256: str
    steps: int = 0
    predictions: int = 0


class RunState(BaseModel):
    """Where a run is, and what it is a run of.

    Attributes:
        step: optimiser steps made.
        epoch, sequences, offset: the place in the data (``batches.Place``).
        rows: predictions learnt from so far.
        recipe: all values of the recipe.
        data, target, vocabulary: SHA-256 of the data's origin (without its shards, which may grow), the target's weights
            and the draft vocabulary.
        layers: of the states read; see ``Features.layers``.
        start: the checkpoint it began from; None: an untrained model.
        best_step, best_score: the step with the highest score on the validation split.
        sha256: of the files beside it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    step: int = 0
    epoch: int = 0
    sequences: int = 0
    offset: int = 0
    rows: int = 0
    recipe: dict[str, Any]
    data: str
    target: str
    vocabulary: str
    layers: tuple[int, ...]
    start: StartRecord | None = None
    best_step: int | None = None
    best_score: float | None = None
    sha256: dict[str, str] = {}


class SnapshotDamaged(OutriderError):
    """A checkpoint is incomplete or altered; the message says what."""


def write_snapshot(
    folder: Path, state: RunState, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]
) -> None:
    """Write ``step-N``, point ``latest`` (and ``best``, if it is this step) at it, and delete older ones.

    Raises:
        ResourceExhausted: it cannot be written; everything written before stays.
    """
    final = folder / f"step-{state.step:08d}"
    building = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        digests = {}
        for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
            content = save({key: each.detach().cpu().contiguous() for key, each in tensors.items()})
            digests[name] = hashlib.sha256(content).hexdigest()
            _write(building / name, content)
        _write(building / STATE, state.model_copy(update={"sha256": digests}).model_dump_json(indent=1).encode())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(building, final)
        # Who goes on from an older ``latest`` comes to this step again; ``best`` would never be written after it.
        if state.best_step == state.step:
            write_whole(folder / BEST, final.name.encode())
        write_whole(folder / LATEST, final.name.encode())
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise ResourceExhausted(
            f"checkpoint {final} cannot be written ({error.strerror}); the earlier ones are whole: make room, then go on"
        ) from error
    _thin_out(folder)


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _thin_out(folder: Path) -> None:
    kept = {folder / name for pointer in (LATEST, BEST) if (name := _pointed(folder, pointer))}
    for old in sorted(set(folder.glob("step-*")) - kept, reverse=True)[_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def _pointed(folder: Path, pointer: str) -> str | None:
    try:
        return (folder / pointer).read_text().strip() or None
    except OSError:
        return None


def read_snapshot(snapshot: Path) -> tuple[RunState, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint's state, model and optimizer.

    Raises:
        SnapshotDamaged: a file is missing, cut off or altered; names it.
    """
    try:
        state = RunState.model_validate_json((snapshot / STATE).read_bytes())
        parts = []
        for name in (MODEL, OPTIMIZER):
            content = (snapshot / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != state.sha256.get(name):
                raise SnapshotDamaged(f"{snapshot / name} is cut off or altered: its checksum differs from {STATE}'s")
            parts.append(load(content))
    except OSError as error:
        raise SnapshotDamaged(f"{error.filename}: {error.strerror}") from error
    except (ValidationError, SafetensorError) as error:
        raise SnapshotDamaged(
            f"{snapshot} is no checkpoint of this version ({' '.join(str(error).split())[:200]})"
        ) from error
    return state, parts[0], parts[1]


def newest_whole(folder: Path) -> tuple[Path, list[str]] | None:
    """The newest checkpoint that is whole, and what is wrong with newer ones; None if there is no checkpoint at all.

    Raises:
        ConfigurationError: there are checkpoints, but none is whole.
    """
    faults: list[str] = []
    for snapshot in sorted(folder.glob("step-*"), reverse=True):
        try:
            read_snapshot(snapshot)
        except SnapshotDamaged as error:
            faults.append(str(error))
        else:
            return snapshot, faults
    if faults:
        raise ConfigurationError(
            f"{folder} holds no whole checkpoint: {'; '.join(faults)}; begin again with --fresh", about=folder
        )
    return None


def find_snapshot(folder: Path) -> Path:
    """The best checkpoint in a run's folder, else the latest; or the folder itself if it is one.

    Raises:
        ConfigurationError: there is none.
    """
    if (folder / STATE).is_file():
        return folder
    for pointer in (BEST, LATEST):
        name = _pointed(folder, pointer)
        if name and (folder / name / STATE).is_file():
            return folder / name
    raise ConfigurationError(f"{folder} holds no checkpoint: see outrider train run", about=folder)


def run_of(snapshot: Path) -> Path:
    """The folder of a checkpoint's run."""
    return snapshot.resolve().parent


def forget_run(folder: Path) -> None:
    """Delete a run's checkpoints and its log."""
    for snapshot in (*folder.glob("step-*"), *folder.glob(".step-*.partial")):
        shutil.rmtree(snapshot, ignore_errors=True)
    for name in (LATEST, BEST, LOG):
        (folder / name).unlink(missing_ok=True)
