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
from services.verifier.loading.layer_names import LayerNames

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
        roundings = _within(model, roundings, LayerNames.of(model, layers))
    round_inputs(model, roundings, SIBLINGS)
    log.info("%d linear layers round what enters them to %s", len(roundings), stored.entering)


def _within(model: nn.Module, roundings: Mapping[str, InputRounding], names: LayerNames) -> dict[str, InputRounding]:
    """Those of a part of the model, by their names in it."""
    # Placeholders of what other stages have.
    elsewhere = {name for name, module in model.named_modules() if isinstance(module, nn.Identity)}
    own = ((names.here(name), rounding) for name, rounding in roundings.items())
    return {name: rounding for name, rounding in own if name is not None and name not in elsewhere}
