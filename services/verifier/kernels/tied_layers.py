"""Layers of several places in a model that have the same weights: packed once, so that these lie in memory once.

Zamba has a block of attention between its other layers that it comes by many times (Glorioso et al., 2405.16712, figure 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from typing import Protocol, TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


class HasWeight(Protocol):
    """A linear layer."""

    @property
    def weight(self) -> object: ...

    @property
    def bias(self) -> object: ...


class TiedLayers:
    """Makes what takes the place of layers. It holds the weights that are tied, so it should not outlive its use.

    Args:
        model: no layer of it has been replaced yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._uses = Counter(id(one.weight) for one in model.modules() if _is_linear(one))
        self._made: dict[tuple[int, ...], tuple[nn.Module, list[object]]] = {}

    def made(self, layers: Iterable[HasWeight], make: Callable[[], _M]) -> _M:
        """What ``make`` makes of these layers, or a twin of what it made of others that have all of their weights."""
        weights = [held for layer in layers for held in (layer.weight, layer.bias)]
        if any(self._uses[id(weight)] < 2 for weight in weights[::2]):
            return make()
        key = tuple(map(id, weights))
        if key in self._made:
            # Of the same weights ``make`` makes the same kind.
            return twin(self._made[key][0])  # type: ignore[return-value]
        made = make()
        self._made[key] = made, weights
        return made


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a layer with weights of its own. Asked of no class: a bare GPU machine cannot import that of blocks."""
    return hasattr(module, "out_features") and hasattr(module, "weight")


def twin(module: _M) -> _M:
    """A module with the same tensors, but with hooks and submodules of its own."""
    made = copy(module)
    vars(made).update({name: copy(held) for name, held in vars(module).items() if isinstance(held, dict)})
    made._modules = {name: child and twin(child) for name, child in module._modules.items()}
    return made
