"""Linear layers, norms and gates whose rows do not depend on what shares their pass; see ``device.row_matmul``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import nn

from services.verifier.kernels.shared_products import as_parameter
from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.row_matmul import add_leaves, multiply
from services.verifier.kernels.triton.device.row_norm import add_and_normalise, gate

# Terms of one product of tiles, columns of a program, and its lanes where there are no sums.
_TERMS, _COLUMNS, _LANES = 64, 64, 1024
# The order of a norm's sum follows from it.
NORM_LANES = 1024
# Programs that fill a GPU (an H100 has 132 units), and most leaves: they are a part of what a layer computes, so both are
# the same on every GPU.
_FILL, _MOST_LEAVES = 128, 8
# Up to so many rows leaves are computed by programs of their own.
_FEW_ROWS = 64
_LEAST_ROWS, _MOST_ROWS = 16, 128


def leaves_of(columns: int, terms: int) -> tuple[int, int]:
    """How the sums of a layer are cut: number of leaves and terms of each, a multiple of ``_TERMS``."""
    wanted = min(_MOST_LEAVES, -(-_FILL // -(-columns // _COLUMNS)))
    tiles = -(-terms // _TERMS)
    each = max(2, -(-tiles // wanted))
    return -(-tiles // each), each * _TERMS


class HeadNorms(NamedTuple):
    """Norms of each head of the queries and keys, before they are rotated: [key size] each."""

    of_query: torch.Tensor
    of_key: torch.Tensor
    eps: float
    rounded: bool


class Product(NamedTuple):
    """What a linear layer makes of rows; its leaves may not be added yet, which kernels that read it do.

    Attributes:
        numbers: [rows, columns], or [leaves, rows, columns], float32, without the bias.
        leaves: their number; 0: the product is finished.
        bias: [columns], to be added; None: there is none.
    """

    numbers: torch.Tensor
    leaves: int = 0
    bias: torch.Tensor | None = None

    @property
    def apart(self) -> int:
        """Numbers from leaf to leaf."""
        return self.numbers.shape[-2] * self.numbers.shape[-1]

    @property
    def some_bias(self) -> torch.Tensor:
        """The bias, or anything that a kernel does not read."""
        return self.numbers if self.bias is None else self.bias

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """The finished product, [rows, columns]."""
        if not self.leaves:
            return self.numbers
        _, rows, columns = self.numbers.shape
        made = self.numbers.new_empty(rows, columns, dtype=dtype)
        add_leaves[(-(-made.numel() // _LANES),)](
            self.numbers, self.some_bias, made, made.numel(), columns, LEAVES=self.leaves, BLOCK=_LANES,
            BIAS=self.bias is not None, **COMPILED,
        )  # fmt: skip
        return made


def product_of(layer: nn.Module, rows: torch.Tensor) -> Product:
    """What ``layer`` makes of ``rows``, [..., terms]; a ``RowLinear`` leaves its leaves apart."""
    if isinstance(layer, RowLinear):
        return layer.product(rows)
    made: torch.Tensor = layer(rows)
    return Product(made.reshape(-1, made.shape[-1]))


class RowLinear(nn.Module):
    """Replaces ``nn.Linear`` for inference. Takes and gives [..., in_features] and [..., out_features].

    Args:
        least_rows: of a program, where there are fewer. No bit depends on it where matrix units of all sizes add alike.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, least_rows: int = _LEAST_ROWS) -> None:
        super().__init__()
        self._least_rows = least_rows
        self.out_features, self.in_features = weight.shape
        self.weight = as_parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.leaves, self.leaf = leaves_of(*weight.shape)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.product(rows).added(rows.dtype).view(*rows.shape[:-1], self.out_features)

    def product(self, rows: torch.Tensor) -> Product:
        """Of [..., in_features]; few rows' leaves are computed by programs of their own."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        count, columns = len(flat), self.out_features
        split = self.leaves > 1 and count <= _FEW_ROWS
        bias = None if self.bias is None else self.bias.data
        made = Product(flat.new_empty(self.leaves, count, columns, dtype=torch.float32), self.leaves, bias)
        if not split:
            made = Product(flat.new_empty(count, columns), 0, bias)
        self._multiply(flat, made, split=split)
        return made if split else Product(made.numbers)

    def gated(self, rows: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of the product times its second half, [..., out_features / 2]; for layers without bias."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        width = self.out_features // 2
        if self.leaves > 1 and len(flat) <= _FEW_ROWS:
            return gated(self.product(flat), rows.dtype).view(*rows.shape[:-1], width)
        made = flat.new_empty(len(flat), width)
        self._multiply(flat, Product(made), gated=True)
        return made.view(*rows.shape[:-1], width)

    def _multiply(self, flat: torch.Tensor, made: Product, *, split: bool = False, gated: bool = False) -> None:
        count, columns = len(flat), made.numbers.shape[-1]
        # A program's rows and columns change no bit. One that gates has twice the columns.
        block = min(_MOST_ROWS, max(self._least_rows, triton.next_power_of_2(count)))
        wide = _COLUMNS // 2 if gated else _COLUMNS
        grid = (-(-count // block), -(-columns // wide), self.leaves if split else 1)
        multiply[grid](
            flat, self.weight, made.some_bias, made.numbers, count, columns, self.leaf, self.in_features,
            LEAVES=self.leaves, ROWS=block, COLUMNS=wide, TERMS=_TERMS, BIAS=made.bias is not None, SPLIT=split, GATED=gated,
            **COMPILED,
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
        product.numbers, product.some_bias, before, weight, total, made, width, eps, product.apart, BLOCK=NORM_LANES,
        RESIDUAL=residual is not None, ROUNDED=rounded, LEAVES=product.leaves, BIAS=product.bias is not None,
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
    gate[(count, -(-columns // 2 // _LANES))](
        both.numbers, made, columns // 2, both.apart, BLOCK=_LANES, LEAVES=both.leaves, **COMPILED
    )
    return made
