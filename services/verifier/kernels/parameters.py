"""Finds the parameters that modules multiply by in their own code, and the modules whose products are not exact."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from services.model_files.weights.stacked_blocks import StackedBlocks
from services.verifier.kernels.exact_weights import ExactWeight, MakePacked, Numbers

# Modules that look up rows or convolve, rather than multiply by a matrix.
_OTHER = (nn.Embedding, nn.modules.conv._ConvNd)


def multiplied(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that a module may multiply by: (module, name, matrices [..., outputs, inputs] or [..., inputs, outputs]).

    Those of torch's own linear layers are left out.
    """
    for module in model.modules():
        if type(module) is nn.Linear or isinstance(module, _OTHER):
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dim() < 2 or min(parameter.shape[-2:]) < 2 or name.endswith("bias"):
                continue
            if parameter.is_floating_point() and parameter.device.type == "cpu":
                yield module, name, parameter


def in_blocks(module: nn.Module) -> Iterator[tuple[str, StackedBlocks]]:
    """What a module has of experts in blocks, by name, until it is packed."""
    for name, value in vars(module).items():
        if isinstance(value, ExactWeight) and isinstance(value.numbers.stored, StackedBlocks):
            yield name, value.numbers.stored


def unpack_parameters(model: nn.Module) -> None:
    """Replace experts in blocks by numbers, by which torch multiplies."""
    for module in model.modules():
        for name, blocks in list(in_blocks(module)):
            delattr(module, name)
            setattr(module, name, nn.Parameter(blocks.float(), requires_grad=False))


def pack_parameters(model: nn.Module, make: MakePacked, make_single: MakePacked) -> int:
    """Replace these parameters by ``ExactWeight``, which packs them, and experts in blocks, at their first product; returns
    their number.

    Args:
        make: packs one of several matrices, as of an expert.
        make_single: packs a single matrix, as of a router.
    """
    # Several modules may share a parameter.
    made: dict[int, ExactWeight] = {}
    for module, name, parameter in list(multiplied(model)):
        weight = made.get(id(parameter))
        if weight is None:
            stored = parameter.detach().contiguous()
            numbers = Numbers(owner=type(module).__name__, shape=stored.shape, stored=stored)
            numbers.make = make if parameter.dim() > 2 else make_single
            weight = made[id(parameter)] = ExactWeight.whole(numbers)
        delattr(module, name)
        setattr(module, name, weight)
    blocks = [getattr(module, name).numbers for module in model.modules() for name, _ in in_blocks(module)]
    for numbers in blocks:
        numbers.make = make
    return len(made) + len(blocks)


def round_the_rest(model: nn.Module, dtype: torch.dtype) -> None:
    """Round parameters that are not packed to ``dtype``; computed buffers (rotary frequencies) keep their precision."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and type(parameter.data) is torch.Tensor:
            parameter.data = parameter.data.to(dtype)


def inexact(model: nn.Module) -> list[str]:
    """Classes of modules whose products depend, in their last bits, on the other rows. Known only after a first pass.

    Products of two computed tensors are not detected.
    """
    found: set[str] = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) and isinstance(module.weight, nn.Parameter):
            found.add(type(module).__name__)
        weights = (value for value in vars(module).values() if isinstance(value, ExactWeight))
        found |= {weight.numbers.owner for weight in weights if weight.numbers.inexact}
    return sorted(found)
