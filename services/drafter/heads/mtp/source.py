"""MTP layers, and Gemma 4's assistants, as a source of drafts: trees, grown as those of EAGLE's heads are."""

from __future__ import annotations

from functools import partial

import torch

from services.drafter.config import DrafterConfig
from services.drafter.heads.assistant.files import holds_assistant, load_assistant
from services.drafter.heads.canary.heads import check_checkpoint
from services.drafter.heads.eagle.source import FeatureSource, TreeForm
from services.drafter.heads.level_graphs import LevelGraphs
from services.drafter.heads.mtp.files import load_mtp
from services.drafter.heads.products import multiply_by_kernels
from services.drafter.sessions.thread import use_threads

NAME = "mtp"


def make(config: DrafterConfig) -> FeatureSource:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: no checkpoint is configured, or it cannot draft for the target; says why.
    """
    trained = config.trained
    folder, target = trained.weights_of(NAME)
    use_threads()
    load = load_assistant if holds_assistant(folder) else load_mtp
    head = load(folder, target, device=trained.device, dtype=getattr(torch, trained.held_dtype))
    multiply_by_kernels(head, trained)
    # The target's own layer is asked for by the strategy's name.
    check_checkpoint(head, folder, target, asked_for=trained.asked_for or trained.default_strategy == NAME)
    return FeatureSource(
        NAME, head, window=trained.window, form=TreeForm.of(trained), ahead=config.draft_ahead > 0,
        graphs=partial(LevelGraphs, required=trained.captures),
    )  # fmt: skip
