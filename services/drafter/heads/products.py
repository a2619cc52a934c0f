"""Products of heads' weights on a CPU by the target's own kernels, in the numbers that their files store.

Heads are loaded in float32, which holds exactly what a file stores in blocks of eight bits or in bfloat16. So the shorter
form is found again by trying: a weight that it holds exactly is multiplied in it, and every product is over the same numbers
as before. The kernels read a fourth of the bytes then, and a row's result does not depend on the rows beside it. That
q is what a draft was drawn from needs no care: both are read off the same logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Protocol

import torch
from torch import nn

from services.drafter.config import TrainedConfig
from services.model_files.weights.stored_blocks import Weight, quantized

log = logging.getLogger(__name__)

# Takes weight and bias; gives a layer that multiplies rows in float32 by them.
MakeProduct = Callable[[Weight, torch.Tensor | None], nn.Module]

# Layers with fewer outputs are not worth a panel of the kernels.
_FEWEST_OUTPUTS = 32
# Rows of a matrix that are tried before all of it is.
_TRIED = 64


class HeadProducts:
    """Makes products.

    Args:
        rounded: round every weight to blocks of eight bits, whatever its file stores.
    """

    def __init__(self, make: MakeProduct, *, rounded: bool = False) -> None:
        self._make = make
        self._rounded = rounded

    @classmethod
    def of(cls, config: TrainedConfig) -> HeadProducts | None:
        """As the settings say; None: torch multiplies, since the head is not on a CPU, computes in a short type, or this
        machine has no kernels."""
        if config.linear_kernels is None or config.device != "cpu" or config.dtype not in ("float32", "int8"):
            return None
        make = config.linear_kernels()
        if make is None:
            log.info("heads are multiplied by torch in float32, which takes longer: this machine has no kernels")
            return None
        return cls(make, rounded=config.dtype == "int8")

    def over(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Module:
        """A layer that multiplies by a weight [outputs, inputs]."""
        weight = weight.detach()
        return self._make(quantized(weight) if self._rounded else shortest(weight), None if bias is None else bias.detach())

    def replace_in(self, module: nn.Module, *, kept: Collection[nn.Module | None] = ()) -> None:
        """Replace the linear layers within a module, but for those that are ``kept``."""
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child.out_features >= _FEWEST_OUTPUTS and child not in kept:
                    setattr(parent, name, self.over(child.weight, child.bias))


class Multiplied(Protocol):
    """A head, or a part of one."""

    def multiply_by(self, products: HeadProducts) -> None:
        """Multiply by the kernels from now on."""


def multiply_by_kernels(head: Multiplied, config: TrainedConfig) -> None:
    """Let a loaded head multiply by the kernels, where settings and machine allow it: see ``HeadProducts.of``."""
    if (products := HeadProducts.of(config)) is not None:
        head.multiply_by(products)


def shortest(weight: torch.Tensor) -> Weight:
    """The shortest form of a float32 weight [outputs, inputs] that holds it exactly: eight bits, bfloat16 or its own."""
    some = weight[torch.linspace(0, len(weight) - 1, min(len(weight), _TRIED), dtype=torch.float64).long()]
    if torch.equal(quantized(some).float(), some) and torch.equal((blocks := quantized(weight)).float(), weight):
        return blocks
    short = weight.bfloat16()
    return short if torch.equal(short.float(), weight) else weight


def take_weights(other: nn.Module, own: nn.Module) -> None:
    """Give a module all parameters of one of its kind, and the layers that took the place of linear ones."""
    layers = dict(other.named_modules())
    for name, module in own.named_modules():
        if type(layers.get(name)) is nn.Linear and type(module) is not nn.Linear:
            other.set_submodule(name, module)
    other.load_state_dict(own.state_dict(), assign=True)
