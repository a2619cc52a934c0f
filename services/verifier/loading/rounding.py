"""Lets the layers of a loaded model round what enters them, where its checkpoint says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.files import WeightFiles
from services.model_files.weights.quantised.method import format_of
from services.model_files.weights.rounded_inputs import InputRounding, round_inputs
from services.verifier.config import TargetConfig
from services.verifier.kernels.shared_products import SIBLINGS

log = logging.getLogger(__name__)


def round_entering(model: PreTrainedModel, config: TargetConfig, layers: range | None = None) -> None:
    """Put the checkpoint's rounding in front of its linear layers, before they are packed.

    Args:
        layers: those of the whole model that this one has; None: all.

    Raises:
        ConfigurationError: a stored scale is none.
        ValueError: what is to round is no linear layer of the model.
    """
    folder = Path(config.model_path)
    stored = format_of(folder)
    if stored is None or not stored.entering:
        return
    with WeightFiles(folder, config.shared_with) as files:
        roundings = files.roundings
    if layers is not None:
        roundings = _within(model, roundings, layers)
    round_inputs(model, roundings, SIBLINGS)
    log.info("%d linear layers round what enters them to %s", len(roundings), stored.entering)


def _within(model: PreTrainedModel, roundings: Mapping[str, InputRounding], layers: range) -> dict[str, InputRounding]:
    """Those of a part of the model, by their names in it."""
    prefix, own = f"{model.base_model_prefix}.layers.", dict[str, InputRounding]()
    for name, rounding in roundings.items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            if int(number) in layers:
                own[f"{prefix}{int(number) - layers.start}.{rest}"] = rounding
        elif not isinstance(model.get_submodule(name), nn.Identity):
            own[name] = rounding
    return own
