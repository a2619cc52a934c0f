"""Tries any drafter that reads the target's states on a canary's texts, whatever kind its checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.drafter.ahead_draft.level_canary import LevelTrial, check_levels
from services.drafter.ahead_draft.medusa_files import load_medusa
from services.drafter.ahead_draft.stream_files import load_streams
from services.drafter.checkpoints import inspect
from services.drafter.feature_draft.canary import CanaryResult, check
from services.drafter.feature_draft.canary_texts import CanaryText
from services.drafter.feature_draft.head_files import load_head
from services.drafter.feature_draft.target_shape import read_target_shape


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
    where, shape = str(folder), read_target_shape(target)
    kind = inspect(folder, target).source
    if kind in ("streaming", "medusa"):
        trial = LevelTrial.of(load_streams(folder, target) if kind == "streaming" else load_medusa(folder, target))
        return CanaryTrial((trial.layer,), lambda texts: check_levels(trial, texts, shape, where))
    head = load_head(folder, target)
    return CanaryTrial(head.config.state_layers, lambda texts: check(head, texts, shape, where))
