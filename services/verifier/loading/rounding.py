"""Lets the layers of a loaded model round what enters them, where its checkpoint says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from services.model_files.weights.files import WeightFiles
from services.model_files.weights.quantised.method import format_of
from services.model_files.weights.rounded_inputs import InputRounding, round_experts, round_inputs
from services.verifier.config import TargetConfig
from services.verifier.kernels.shared_products import SIBLINGS
from services.verifier.loading.joined_weights import JoinedWeights
from services.verifier.loading.layer_names import LayerNames

log = logging.getLogger(__name__)

_R = TypeVar("_R")


def round_entering(
    model: PreTrainedModel, config: TargetConfig, whole: PreTrainedModel, layers: range | None = None
) -> None:
    """Put the checkpoint's rounding in front of its linear layers and experts, before they are packed.

    Args:
        whole: the whole model, with or without weights.
        layers: those of the whole model that this one has; None: all.

    Raises:
        ConfigurationError: a stored scale is none.
        ValueError: what is to round is no linear layer and no expert of the model, or is not computed so.
    """
    folder = Path(config.model_path)
    with WeightFiles(folder, config.shared_with) as files:
        roundings = files.roundings
        joined = JoinedWeights(files, whole, whole.state_dict().keys())
        experts = _of_experts(joined, roundings)
    for name in (source for stack in experts for matrices in joined.sources(stack) for source in matrices):
        roundings.pop(name.removesuffix(".weight"), None)
    if experts and config.device != "cpu":
        raise ValueError(f"what enters {min(experts)} is to be rounded (input_activations), which GPUs do not do so far")
    if layers is not None:
        names = LayerNames.of(model, layers)
        roundings, experts = _within(model, roundings, names), _within(model, experts, names)
    round_inputs(model, roundings, SIBLINGS)
    round_experts(model, experts)


def rounds(config: TargetConfig) -> bool:
    """Whether the checkpoint says that layers round what enters them."""
    stored = format_of(Path(config.model_path))
    if stored is None or not stored.entering:
        return False
    log.info("layers round what enters them to %s", stored.entering)
    return True


def _of_experts(joined: JoinedWeights, roundings: Mapping[str, InputRounding]) -> dict[str, Sequence[InputRounding | None]]:
    """Of each expert, by the parameter that has the matrices of all.

    Raises:
        ValueError: matrices that share a product round what enters them in different ways.
    """
    found: dict[str, Sequence[InputRounding | None]] = {}
    for name in joined.stacked:
        each = [{roundings.get(source.removesuffix(".weight")) for source in matrices} for matrices in joined.sources(name)]
        apart = next((matrices for matrices, own in zip(joined.sources(name), each, strict=True) if len(own) > 1), None)
        if apart is not None:
            raise ValueError(f"what enters {' and '.join(apart)} is rounded in different ways, and they share a product")
        of_each = [next(iter(own)) for own in each]
        if any(one is not None for one in of_each):
            found[name] = of_each
    return found


def _within(model: nn.Module, roundings: Mapping[str, _R], names: LayerNames) -> dict[str, _R]:
    """Those of a part of the model, by their names in it."""
    # Placeholders of what other stages have.
    elsewhere = {name for name, module in model.named_modules() if isinstance(module, nn.Identity)}
    own = ((names.here(name), rounding) for name, rounding in roundings.items())
    return {name: rounding for name, rounding in own if name is not None and name not in elsewhere}
