"""One product for several linear layers that get the same input, such as query, key and value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn
from typing_extensions import override

_M = TypeVar("_M", bound=nn.Module)

# Children of one module that are called in this order with the same input.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class HasBias(Protocol):
    """A linear layer."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[outputs]."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class Shared:
    """One product for several layers. Its result is kept from the call of the first layer to that of the last."""

    def __init__(self, sizes: Sequence[int], packed: nn.Module) -> None:
        self.sizes = list(sizes)
        self.packed = packed
        self._input: torch.Tensor | None = None
        self._results: tuple[torch.Tensor, ...] = ()

    def result(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Layer ``index``'s part of the product."""
        if self._input is not rows:
            self._input, self._results = rows, self.packed(rows).split(self.sizes, dim=-1)
        result = self._results[index]
        if index == len(self.sizes) - 1:
            self._input, self._results = None, ()
        return result


class SharedLinear(nn.Module):
    """Replaces one of several ``nn.Linear`` layers that get the same input."""

    def __init__(self, shared: Shared, index: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, shared.sizes[index]
        self.shared = shared
        self._index = index

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.shared.result(rows, self._index)


def shared_product(layers: Sequence[nn.Module]) -> nn.Module | None:
    """The product that computes all of these layers; None if there is no single one."""
    products = [layer.shared.packed for layer in layers if isinstance(layer, SharedLinear)]
    return products[0] if len(products) == len(layers) and len(set(map(id, products))) == 1 else None


def replace_by(packed: nn.Module, parent: nn.Module, layers: Mapping[str, HasBias]) -> None:
    """Let ``packed`` compute the children ``layers`` of ``parent``, in their order."""
    if len(layers) == 1:
        setattr(parent, next(iter(layers)), packed)
        return
    shared = Shared([layer.out_features for layer in layers.values()], packed)
    for index, (name, layer) in enumerate(layers.items()):
        setattr(parent, name, SharedLinear(shared, index, layer.in_features))
    # Held by the first layer, so that it moves with the model from device to device.
    parent.get_submodule(next(iter(layers))).add_module("packed", packed)


def joint_bias(layers: Sequence[HasBias]) -> torch.Tensor | None:
    """The biases of layers one after the other, [outputs of all]; None if none has one."""
    given = next((layer.bias for layer in layers if layer.bias is not None), None)
    if given is None:
        return None
    return torch.cat([given.new_zeros(each.out_features) if each.bias is None else each.bias for each in layers])


def joint_weight(layers: Sequence[nn.Linear]) -> torch.Tensor:
    """The weights of layers one after the other, [outputs of all, inputs]; a single one as it is, since it may be tied."""
    return layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])


def joint_layer(make: Callable[[torch.Tensor, torch.Tensor | None], _M], layers: Sequence[nn.Linear]) -> _M:
    """What ``make`` makes of the weights and biases of layers one after the other."""
    return make(joint_weight(layers), joint_bias(layers))


def as_parameter(weight: torch.Tensor) -> nn.Parameter:
    """``weight`` in one piece; a parameter itself where it can be, so that tied ones stay one when the model moves."""
    if isinstance(weight, nn.Parameter) and weight.is_contiguous():
        return weight
    return nn.Parameter(weight.detach().contiguous(), requires_grad=False)
