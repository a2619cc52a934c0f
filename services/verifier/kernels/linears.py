"""Linear layers whose weights are packed once, when the model is loaded, for our own kernels or in oneDNN's layout.

This has two gains on a CPU. Speed: torch repacks the weights at every call, which makes 2 to 16 rows cost twice as much as
one. Exactness: a row's result is bit for bit independent of how many other rows share the pass, so a token that is verified
in a tree gets the same numbers as alone (docs/log.md, 2026-11-21).

Layers that are called one after the other with the same input (query, key and value; gate and up) share one product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from services.model_files.weights.stored_blocks import StoredBlocks, StoredLinear, Weight, alike, joined
from services.verifier.config import TargetConfig
from services.verifier.kernels.exact_weights import PackedLinear
from services.verifier.kernels.shared_products import SIBLINGS, joint_bias, replace_by
from services.verifier.kernels.tied_layers import TiedLayers
from services.verifier.model.gpu_here import multiplies_fp8
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Takes weight and bias.
MakeLinear = Callable[[Weight, torch.Tensor | None], PackedLinear]

# Layers that are packed.
Linear = nn.Linear | StoredLinear

# Number of rows for which the packed layout is optimised; any number works.
_TYPICAL_ROWS = 16


def as_float(weight: Weight) -> torch.Tensor:
    """The weight in float32, [outputs, inputs]."""
    return weight.float() if isinstance(weight, StoredBlocks) else weight.detach().float()


class OneDnnLinear(PackedLinear):
    """Replaces ``nn.Linear`` for inference in float32 on a CPU."""

    # For a single row, oneDNN uses another kernel, which rounds differently.
    min_rows = 2

    def __init__(self, weight: Weight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(as_float(weight), _TYPICAL_ROWS)
        self._bias = None if bias is None else bias.detach().float()

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result


def quantize(model: nn.Module, config: TargetConfig) -> None:
    """Give every ``nn.Linear`` of a model that is to move to a GPU torchao's int8 or fp8 weights, where ours cannot serve.

    With fp8, inputs are rounded to fp8 as well. Each row has a scale of its own: one for all would let a token's numbers
    depend on what shares its pass.

    Raises:
        ConfigurationError: torchao is not installed, or the GPU does not multiply in fp8.
    """
    device = torch.device(config.device)
    if config.dtype == "fp8" and not multiplies_fp8(device):
        found = torch.cuda.get_device_capability(device)
        raise ConfigurationError(
            (
                "by torch needs a GPU of compute capability 8.9 (Ada, Hopper) or later, "
                f"{config.device} has {found[0]}.{found[1]}; use bfloat16, int8 or verifier.kernels: triton"
            ),
            field="verifier.dtype",
            value="fp8",
        )
    try:
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int8WeightOnlyConfig,
            PerRow,
            quantize_,
        )
    except ImportError as error:
        raise ConfigurationError(
            "needs torchao: pip install 'outrider-server[int8]'", field="verifier.dtype", value=config.dtype
        ) from error
    if config.dtype == "int8":
        quantize_(model, Int8WeightOnlyConfig())
        return
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    # torchao leaves out layers whose inputs or outputs are no multiple of 16.
    linears = [(name, child) for name, child in model.named_modules() if isinstance(child, nn.Linear)]
    left = [name for name, linear in linears if type(linear.weight.data) is torch.Tensor]
    if left:
        log.info("these layers stay bfloat16: %s", ", ".join(left))


def as_linears(model: nn.Module) -> None:
    """Replace every ``Conv1D`` in ``model`` (GPT-2's linear layer with transposed weights) by an ``nn.Linear``."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is Conv1D:
                weight = child.get_parameter("weight").T.contiguous()
                linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
                linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), child.get_parameter("bias")
                setattr(parent, name, linear)


def pack_linears(model: nn.Module, make: MakeLinear) -> int:
    """Replace every linear layer in ``model`` by a packed one; returns their number."""
    replaced = 0
    tied = TiedLayers(model)
    for parent, layers in products(model):
        linears = list(layers.values())
        replace_by(tied.made(linears, partial(_packed, make, linears)), parent, layers)
        replaced += len(linears)
    return replaced


def _packed(make: MakeLinear, linears: Sequence[Linear]) -> PackedLinear:
    return make(joined([linear.weight for linear in linears]), joint_bias(linears))


def products(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Linear]]]:
    """Groups of linear layers in ``model`` that can share a product, most of them of one layer: (parent, layers by name).

    Whoever replaces them may do so under way, and then holds at most one parent's layers twice.
    """
    for parent in [module for module in model.modules() if any(_is_linear(child) for child in module.children())]:
        yield from [(parent, layers) for layers in _products_of(parent)]


def _products_of(parent: nn.Module) -> Iterator[dict[str, Linear]]:
    children = {name: child for name, child in parent.named_children() if _is_linear(child)}
    for names in SIBLINGS:
        if children.keys() >= set(names) and alike([children[name].weight for name in names]):
            yield {name: children.pop(name) for name in names}
    for name, child in children.items():
        yield {name: child}


def _is_linear(module: nn.Module) -> TypeGuard[Linear]:
    return type(module) in (nn.Linear, StoredLinear)
