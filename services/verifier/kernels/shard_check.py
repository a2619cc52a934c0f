"""Checks that a rank's columns of a product have the bits that they have in the whole one, as ranks rely on.

Our own kernels cut a sum by its terms alone, so that their columns cannot know what is beside them. Others' choose their
tiles by the whole shape, and are compared at every start: random weights of the whole shape, since only that matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from services.verifier.attention.fixed import MOST_ROWS, largest_pass, row_steps
from services.verifier.config import TargetConfig
from services.verifier.kernels.linears import products
from services.verifier.kernels.sharded_layers import ShardedLinear

MakeLayer = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]

# Rows of prompts; passes that are not captured may have any number.
_PROMPTS = (527, 1111, 2048)


class ShardedProduct(NamedTuple):
    """A product of which a rank computes some columns.

    Attributes:
        inputs: its terms.
        parts: of each layer in it, one beside the other: the number of all outputs, and those that the rank has.
        biased: whether a layer has a bias.
    """

    inputs: int
    parts: tuple[tuple[int, tuple[range, ...]], ...]
    biased: bool

    @property
    def outputs(self) -> int:
        """Of the whole product."""
        return sum(whole for whole, _ in self.parts)

    @property
    def held(self) -> list[int]:
        """The outputs that the rank has, in its order."""
        found: list[int] = []
        before = 0
        for whole, ranges in self.parts:
            found += [before + one for own in ranges for one in own]
            before += whole
        return found


def sharded_products(model: nn.Module) -> list[ShardedProduct]:
    """The products of a model that ranks share, each shape once; empty if it is whole."""
    shards = next((module.shards for module in model.modules() if isinstance(module, ShardedLinear)), None)
    if shards is None:
        return []
    names = {module: name for name, module in model.named_modules()}
    found: dict[ShardedProduct, None] = {}
    for parent, layers in products(model):
        places = [names[parent] if isinstance(parent, ShardedLinear) else f"{names[parent]}.{name}" for name in layers]
        cuts = [shards.cuts.get(f"{place}.weight") for place in places]
        if any(cuts):
            given = list(layers.values())
            parts = [
                (layer.out_features, (range(layer.out_features),)) if cut is None else (cut.whole, cut.ranges)
                for layer, cut in zip(given, cuts, strict=True)
            ]
            biased = any(layer.bias is not None for layer in given)
            found[ShardedProduct(given[0].in_features, tuple(parts), biased)] = None
    return list(found)


def compared_rows(config: TargetConfig) -> list[int]:
    """Of a single row, of all passes that are captured, of some prompts, and of the largest pass."""
    return sorted({1, *row_steps(MOST_ROWS), *_PROMPTS, largest_pass(config).rows})


@torch.no_grad()
def unequal_shard(wanted: Iterable[ShardedProduct], make: MakeLayer, counts: Iterable[int], device: torch.device) -> str:
    """The first product whose columns have other bits in a rank's layer than in the whole one; empty if none has.

    Args:
        make: makes a layer of these kernels.
        counts: numbers of rows.
    """
    counts = list(counts)
    for product in wanted:
        held = torch.tensor(product.held, device=device)
        weight = torch.randn(product.outputs, product.inputs, device=device, dtype=torch.bfloat16)
        bias = weight[:, 0].contiguous() if product.biased else None
        whole, own = make(weight, bias), make(weight[held], None if bias is None else bias[held])
        for count in counts:
            rows = torch.randn(count, product.inputs, device=device, dtype=torch.float32).bfloat16()
            if not torch.equal(own(rows), whole(rows)[:, held]):
                return f"{len(held)} of {product.outputs} columns, of {product.inputs} terms, at {count} rows"
    return ""
