"""Linear layers, norms and gates whose rows do not depend on what shares their pass; see ``device.row_matmul``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import nn
from typing_extensions import override

from services.verifier.kernels.shared_products import as_parameter
from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.row_matmul import LEAVES, add_parts, multiply
from services.verifier.kernels.triton.device.row_norm import add_and_normalise, gate

# Terms of one product of tiles, of which bytes lie in pairs; and of a larger one, where a leaf has room for two of it.
TERMS, MANY_TERMS = 64, 128
# Columns of a program, and its lanes where there are no sums.
COLUMNS, LANES = 64, 1024
# The order of a norm's sum follows from it.
NORM_LANES = 1024
# Programs that fill a GPU (an H100 has 132 units).
_FILL = 128
# Of a program. Those of most rows hold the sums of their tree's nodes in most registers that there are.
LEAST_ROWS, MOST_ROWS = 16, 64


def leaf_of(terms: int) -> int:
    """Terms of each leaf of a sum, a multiple of ``TERMS``: a definition. The last leaves may have fewer, or none."""
    return max(2, -(-terms // (LEAVES * TERMS))) * TERMS


def parts_of(columns: int, terms: int, rows: int) -> int:
    """In how many parts programs compute a sum, so that they fill a GPU. It changes no bit, as all here but the leaves."""
    used, parts = -(-terms // leaf_of(terms)), 1
    blocks = -(-columns // COLUMNS) * -(-rows // MOST_ROWS)
    while parts < used and parts * blocks < _FILL:
        parts *= 2
    return parts


class Tiles(NamedTuple):
    """What a program of a product computes at a time, which changes no bit: the fastest of those tried on an H100.

    Attributes:
        rows, columns: of the program; one that gates has as many columns of each half.
        terms: of one product of tiles.
        stages: products whose operands are copied ahead.
    """

    rows: int
    columns: int
    terms: int
    stages: int

    @classmethod
    def of(cls, rows: int, leaf: int, *, gated: bool, size: int) -> Tiles:
        """Those for a program of so many rows, leaves of so many terms, and weights of so many bytes each."""
        columns = COLUMNS // 2 if gated else COLUMNS
        if size != torch.bfloat16.itemsize or leaf % MANY_TERMS or leaf < 2 * MANY_TERMS:
            return cls(rows, columns, TERMS, 4 if rows == MOST_ROWS else 6)
        return cls(rows, columns, MANY_TERMS, 3 if rows == MOST_ROWS else 6 if gated else 4)


class HeadNorms(NamedTuple):
    """Norms of each head of the queries and keys, before they are rotated: [key size] each."""

    of_query: torch.Tensor
    of_key: torch.Tensor
    eps: float
    rounded: bool


class Product(NamedTuple):
    """What a linear layer makes of rows; its parts may not be added yet, which kernels that read it do.

    Attributes:
        numbers: [rows, columns], or [parts, rows, columns], float32, without the bias.
        parts: their number; 0: the product is finished.
        bias: [columns], to be added; None: there is none.
    """

    numbers: torch.Tensor
    parts: int = 0
    bias: torch.Tensor | None = None

    @property
    def apart(self) -> int:
        """Numbers from part to part."""
        return self.numbers.shape[-2] * self.numbers.shape[-1]

    @property
    def some_bias(self) -> torch.Tensor:
        """The bias, or anything that a kernel does not read."""
        return self.numbers if self.bias is None else self.bias

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """The finished product, [rows, columns]."""
        if not self.parts:
            return self.numbers
        _, rows, columns = self.numbers.shape
        made = self.numbers.new_empty(rows, columns, dtype=dtype)
        add_parts[(-(-made.numel() // LANES),)](
            self.numbers, self.some_bias, made, made.numel(), columns, PARTS=self.parts, BLOCK=LANES,
            BIAS=self.bias is not None, **COMPILED,
        )  # fmt: skip
        return made


class HeldWeights(NamedTuple):
    """What a product's kernel reads of a layer.

    Attributes:
        numbers: [columns, ...]: the weights, or, in pairs, their bytes.
        scales: [columns], float32, of bytes; else anything.
        shift: see ``device.weight_bytes``; None: they are no bytes.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    shift: int | None = None

    @property
    def size(self) -> int:
        """Bytes of a weight."""
        return self.numbers.itemsize if self.shift is None else 1


def product_of(layer: nn.Module, rows: torch.Tensor) -> Product:
    """What ``layer`` makes of ``rows``, [..., terms]; a ``RowLinear`` leaves parts of its sums apart."""
    if isinstance(layer, RowLinear):
        return layer.product(rows)
    made: torch.Tensor = layer(rows)
    return Product(made.reshape(-1, made.shape[-1]))


class RowLinear(nn.Module):
    """Replaces ``nn.Linear`` for inference. Takes and gives [..., in_features] and [..., out_features].

    Args:
        least_rows: of a program, where there are fewer. No bit depends on it where matrix units of all sizes add alike.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, least_rows: int = LEAST_ROWS) -> None:
        super().__init__()
        self._least_rows = least_rows
        self.out_features, self.in_features = weight.shape
        self._hold(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.leaf = leaf_of(self.in_features)

    def _hold(self, weight: torch.Tensor) -> None:
        self.weight = as_parameter(weight)

    def weights(self) -> HeldWeights:
        """What kernels read of it."""
        return HeldWeights(self.weight, self.weight)

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.product(rows).added(rows.dtype).view(*rows.shape[:-1], self.out_features)

    def product(self, rows: torch.Tensor) -> Product:
        """Of [..., in_features]."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        count, columns = len(flat), self.out_features
        parts = parts_of(columns, self.in_features, count)
        bias = None if self.bias is None else self.bias.data
        if parts == 1:
            made = flat.new_empty(count, columns)
            self._multiply(flat, Product(made, 0, bias))
            return Product(made)
        split = Product(flat.new_empty(parts, count, columns, dtype=torch.float32), parts, bias)
        self._multiply(flat, split)
        return split

    def gated(self, rows: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of the product times its second half, [..., out_features / 2]; for layers without bias."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        width = self.out_features // 2
        if parts_of(self.out_features, self.in_features, len(flat)) > 1:
            return gated(self.product(flat), rows.dtype).view(*rows.shape[:-1], width)
        made = flat.new_empty(len(flat), width)
        self._multiply(flat, Product(made), gated=True)
        return made.view(*rows.shape[:-1], width)

    def _multiply(self, flat: torch.Tensor, made: Product, *, gated: bool = False) -> None:
        count, columns = len(flat), made.numbers.shape[-1]
        weights = self.weights()
        block = min(MOST_ROWS, max(self._least_rows, triton.next_power_of_2(count)))
        tiles = Tiles.of(block, self.leaf, gated=gated, size=weights.size)
        grid = (-(-count // block), -(-columns // tiles.columns), max(1, made.parts))
        multiply[grid](
            flat, weights.numbers, weights.scales, made.some_bias, made.numbers, count, columns, self.leaf,
            self.in_features, weights.numbers.shape[1], PARTS=max(1, made.parts), ROWS=block, COLUMNS=tiles.columns,
            TERMS=tiles.terms, BIAS=made.bias is not None and not made.parts, GATED=gated, BYTES=weights.shift is not None,
            SHIFT=weights.shift or 0, num_stages=tiles.stages, **COMPILED,
        )  # fmt: skip


def normalise(
    rows: torch.Tensor | Product, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rounded: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS normalisation of ``rows`` + ``residual``, [..., width] (arXiv:1910.07467); returns the sum too.

    Args:
        rows: a product needs a ``residual``.
        rounded: whether a normalised row is rounded to its own type before it is multiplied by the weight.
    """
    product = rows if isinstance(rows, Product) else Product(rows.contiguous())
    before = product.numbers if residual is None else residual.contiguous()
    made = torch.empty_like(before)
    total = before if residual is None else torch.empty_like(before)
    width = before.shape[-1]
    add_and_normalise[(before.numel() // width,)](
        product.numbers, product.some_bias, before, weight, total, made, eps, product.apart, WIDTH=width, BLOCK=NORM_LANES,
        RESIDUAL=residual is not None, ROUNDED=rounded, PARTS=product.parts, BIAS=product.bias is not None,
        **COMPILED,
    )  # fmt: skip
    return made, total


def gated(both: torch.Tensor | Product, dtype: torch.dtype | None = None) -> torch.Tensor:
    """SiLU of the first half of each row times its second half: [..., 2 * width] to [..., width].

    Args:
        dtype: of the result, for a product; it must have no bias.
    """
    if isinstance(both, torch.Tensor):
        flat = both.reshape(-1, both.shape[-1]).contiguous()
        return gated(Product(flat), both.dtype).view(*both.shape[:-1], -1)
    count, columns = both.numbers.shape[-2:]
    made = both.numbers.new_empty(count, columns // 2, dtype=dtype)
    gate[(count, -(-columns // 2 // LANES))](
        both.numbers, made, columns // 2, both.apart, BLOCK=LANES, PARTS=both.parts, **COMPILED
    )
    return made
