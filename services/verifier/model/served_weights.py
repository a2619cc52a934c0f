"""Which numbers a served model has: how its files store them, and how they are multiplied."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch import nn

from services.model_files.weights.quantised.method import format_of
from services.model_files.weights.stored_form import stored_form
from services.verifier.config import TargetConfig
from services.verifier.kernels.cpu_choice import Choice
from services.verifier.kernels.exact_weights import ExactWeight, PackedLinear
from speculation.messages import ServedWeights

# How torchao's kernels round what enters a layer with weights in fp8; ours do not.
_BY_TORCH = "floats of 8 bits with a scale for each row"
_IN_CACHE = "floats of 8 bits with a scale for each row and head"


def served_weights(model: nn.Module, choice: Choice, config: TargetConfig) -> ServedWeights:
    """Of a loaded model, which has computed a pass: only then is it known as what its parameters multiply.

    Args:
        choice: what computes its linear layers.
    """
    folder = Path(config.model_path)
    quantised = format_of(folder)
    rounded = "" if quantised is None else quantised.entering
    if config.dtype == "fp8" and choice.linears == "torch":
        rounded = _BY_TORCH
    return ServedWeights(
        stored=stored_form(folder),
        multiplied=_held(model) if config.device == "cpu" else (config.dtype,),
        kernels=choice.linears,
        rounded_inputs=rounded,
        rounded_cache=_IN_CACHE if config.rounds_cache else "",
    )


def _held(model: nn.Module) -> tuple[str, ...]:
    """The types of what linear layers and parameters multiply by on a CPU, that of most numbers first."""
    numbers: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            numbers[str(module.weight.dtype).removeprefix("torch.")] += module.weight.numel()
        packed = [module] if isinstance(module, PackedLinear) else []
        for weight in vars(module).values():
            packed += weight.numbers.packed if isinstance(weight, ExactWeight) else []
        for one in packed:
            numbers[one.stored_as] += one.out_features * one.in_features
    return tuple(kind for kind, _ in numbers.most_common())
