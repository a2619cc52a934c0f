"""Models that several threads load at once: a target, draft models, the shape of a model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as messages

from services.drafter.draft_model.loading import load_draft_model, quietly
from services.verifier.config import TargetConfig
from services.verifier.loading.load_model import hollow_model, load_whole
from tests.draft_models import draft_beside

_ROUNDS, _PATIENCE_S = 5, 60


def test_transformers_is_left_as_it_was(tiny_model: Path) -> None:
    """It replaces ``tie_weights`` and torch's default type while it makes a model; the last one out once kept them replaced."""
    config = TargetConfig(model_path=str(tiny_model))
    draft = draft_beside(tiny_model)
    loads: list[Callable[[], object]] = [
        lambda: load_whole(config),
        lambda: load_draft_model(draft, tiny_model, device="cpu", dtype="float32"),
        lambda: load_draft_model(draft, tiny_model, device="cpu", dtype="bfloat16"),
        lambda: hollow_model(replace(config, dtype="bfloat16", device="cuda")),
    ]
    tie_weights, dtype = PreTrainedModel.tie_weights, torch.get_default_dtype()
    together = Barrier(len(loads))

    def load(make: Callable[[], object]) -> None:
        for _ in range(_ROUNDS):
            together.wait(_PATIENCE_S)
            make()

    with ThreadPoolExecutor(len(loads)) as threads:
        list(threads.map(load, loads))
    assert PreTrainedModel.tie_weights is tie_weights
    assert torch.get_default_dtype() is dtype


def test_transformers_prints_again_what_it_printed() -> None:
    """Of two that keep it quiet, the second to begin has found it so, and may be the last one to end."""
    before = messages.get_verbosity(), messages.is_progress_bar_enabled()
    first, second = quietly(), quietly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (messages.get_verbosity(), messages.is_progress_bar_enabled()) == (messages.ERROR, False)
    second.__exit__(None, None, None)
    assert (messages.get_verbosity(), messages.is_progress_bar_enabled()) == before
