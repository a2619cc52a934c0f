"""Tries any drafter that reads the target's states on a canary's texts, whatever kind its checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.drafter.heads.assistant.files import holds_assistant, load_assistant
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.canary.heads import check
from services.drafter.heads.canary.levels import LevelModel, LevelTrial, check_levels
from services.drafter.heads.canary.texts import CanaryText
from services.drafter.heads.canary.verdict import CanaryResult
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.files.target_shape import read_target_shape
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.mtp.files import load_mtp
from services.drafter.heads.state_head import StateHead
from services.drafter.heads.streams.files import load_streams
from services.model_files.folder import reading


@dataclass(frozen=True, slots=True)
class CanaryTrial:
    """A drafter on trial.

    Attributes:
        layers: whose states it reads, see ``Features.layers``.
        check: measures it on texts; raises ConfigurationError if it is useless.
    """

    layers: tuple[int, ...]
    check: Callable[[Sequence[CanaryText]], CanaryResult]


def open_trial(folder: Path, target: Path) -> CanaryTrial:
    """Load the checkpoint in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: it cannot draft for the target, or reads no states.
    """
    with reading(f"load the drafter at {folder}", about=folder):
        return _opened(folder, target)


def _opened(folder: Path, target: Path) -> CanaryTrial:
    where, shape = str(folder), read_target_shape(target)
    kind = inspect(folder, target).source
    loaders: dict[str, Callable[[Path, Path], LevelModel]] = {
        "streaming": load_streams,
        "medusa": load_medusa,
        "dflash": load_blocks,
    }
    load = loaders.get(kind)
    if load is not None:
        trial = LevelTrial.of(load(folder, target))
        return CanaryTrial(trial.layers, lambda texts: check_levels(trial, texts, shape, where))
    if kind == "mtp":
        head: StateHead = (load_assistant if holds_assistant(folder) else load_mtp)(folder, target)
    else:
        head = load_head(folder, target)
    return CanaryTrial(head.state_layers, lambda texts: check(head, texts, shape, where))
