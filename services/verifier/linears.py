"""Linear layers whose weights are packed once, when the model is loaded: by our own kernels, or else in oneDNN's layout.

Two gains on a CPU. Speed: torch's default repacks the weights at every call, which makes 2 to 16 rows cost twice what one
row costs. Exactness: a row's result does not depend, bit for bit, on how many other rows share the pass, so a token checked
in a tree sees the very numbers that it would have seen alone (docs/log.md, 2026-11-21).

Layers that are asked the same thing one after the other (query, key and value; gate and up) share one product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from services.verifier.native.library import library
from services.verifier.native.linear import NativeLinear
from speculation.errors import ConfigurationError

# From weight and bias.
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]

# Row count that the packed layout is laid out for; any number of rows works.
_TYPICAL_ROWS = 16

# Children of one module that are called in this order with the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class OneDnnLinear(nn.Module):
    """Drop-in for ``nn.Linear`` in inference: float32, CPU. Needs two rows or more for row-exact results."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        self._bias = None if bias is None else bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result


class _Shared:
    """One product for several layers; remembers it from the first of them to the last."""

    def __init__(self, linears: Sequence[nn.Linear], make: MakeLinear) -> None:
        self.sizes = [linear.out_features for linear in linears]
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat(
                [torch.zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
            )
        self._packed = make(torch.cat([linear.weight for linear in linears]), bias)
        self._input: torch.Tensor | None = None
        self._results: tuple[torch.Tensor, ...] = ()

    def result(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Layer ``index``'s share of the product."""
        if self._input is not rows:
            self._input, self._results = rows, self._packed(rows).split(self.sizes, dim=-1)
        result = self._results[index]
        if index == len(self.sizes) - 1:
            self._input, self._results = None, ()
        return result


class SharedLinear(nn.Module):
    """Drop-in for one of several ``nn.Linear`` that are given the same input."""

    def __init__(self, shared: _Shared, index: int, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, shared.sizes[index]
        self._shared = shared
        self._index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._shared.result(rows, self._index)


def best_linear(dtype: str = "float32") -> tuple[MakeLinear, int] | None:
    """What makes the fastest layers on this CPU, and how few rows they may get; None: nothing beats torch's.

    Args:
        dtype: of the weights, float32 or int8; the rows are float32.

    Raises:
        ConfigurationError: int8 without our own kernels, which alone know it.
    """
    kernels = library()
    if kernels is None and dtype == "int8":
        raise ConfigurationError("dtype is int8: on a CPU that needs a C compiler (cc); use float32 or bfloat16")
    if kernels is not None:
        return functools.partial(NativeLinear, kernels, dtype=getattr(torch, dtype)), 1
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if available and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        # With a single row oneDNN takes another kernel, with other rounding.
        return OneDnnLinear, 2
    return None


def quantize(model: nn.Module) -> None:
    """Give every ``nn.Linear`` of a model on a GPU int8 weights, by torchao.

    Raises:
        ConfigurationError: torchao is not installed.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigurationError("dtype is int8: needs torchao: pip install 'outrider-server[int8]'") from error
    quantize_(model, Int8WeightOnlyConfig())


def pack_linears(model: nn.Module, make: MakeLinear) -> int:
    """Replace every ``nn.Linear`` below ``model``; returns how many."""
    replaced = 0
    for parent in list(model.modules()):
        for names in _SIBLINGS:
            replaced += _share(parent, names, make)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))
                replaced += 1
    return replaced


def _share(parent: nn.Module, names: Sequence[str], make: MakeLinear) -> int:
    linears = [getattr(parent, name, None) for name in names]
    found = [linear for linear in linears if type(linear) is nn.Linear]
    if len(found) < len(names) or len({linear.in_features for linear in found}) > 1:
        return 0
    shared = _Shared(found, make)
    for index, (name, linear) in enumerate(zip(names, found, strict=True)):
        setattr(parent, name, SharedLinear(shared, index, linear.in_features))
    return len(found)
