"""Finds the models that draft: those that the settings name, or those that come with Outrider for the target."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import drafters
from cluster.config import Settings
from cluster.models import ResolvedModel
from services.drafter.checkpoints import Checkpoint, inspect
from services.drafter.config import TrainedConfig
from services.settings import filled
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

_BUNDLED = Path(drafters.__file__).parent


def draft_models(settings: Settings, model: ResolvedModel) -> Mapping[str, Checkpoint]:
    """The models that draft for ``model``, by source. If its folder is not here yet, less is checked.

    Raises:
        ConfigurationError: a folder of ``drafter.models`` cannot be used, or two hold weights of the same source.
    """
    named = settings.drafter.models
    target = model.path if (model.path / "config.json").is_file() else None
    found: dict[str, Checkpoint] = {}
    for folder in bundled(model.name) if named is None else named:
        try:
            checkpoint = inspect(folder.expanduser().resolve(), target)
        except ConfigurationError as error:
            if named is not None:
                raise
            # Another model may have the same name; nobody asked for these weights.
            log.info("the weights that come along for %s are not used: %s", model.name, error)
            continue
        if (other := found.get(checkpoint.source)) is not None:
            raise ConfigurationError(
                f"drafter.models names {other.folder} and {folder}: both are weights of {checkpoint.source}; name one"
            )
        found[checkpoint.source] = checkpoint
    return found


def trained_config(settings: Settings) -> TrainedConfig:
    """Settings of the sources that run a model, which is not named yet."""
    return filled(TrainedConfig, functools.partial(getattr, settings.drafter))


def with_checkpoints(config: TrainedConfig, settings: Settings, found: Mapping[str, Checkpoint]) -> TrainedConfig:
    """``config`` with the models ``found``, and whether somebody named them."""
    folders = {name: each.folder for name, each in found.items()}
    return replace(config, checkpoints=folders, asked_for=settings.drafter.models is not None)


def memory_here(settings: Settings, model: ResolvedModel) -> int:
    """Bytes of this machine's memory that the models take which are loaded at start to draft for ``model``."""
    config = trained_config(settings)
    if config.device != "cpu":
        return 0
    found = draft_models(settings, model)
    loaded = with_checkpoints(config, settings, found).at_start
    return sum(found[name].bytes_in(config.dtype) for name in loaded)


def bundled(model: str) -> list[Path]:
    """The folders of weights that come with Outrider for the model of this name."""
    folder = _BUNDLED / Path(model).name.strip(".").lower()
    return sorted(file.parent for file in folder.glob("*/config.json"))
