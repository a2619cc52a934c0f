"""Linear layers, norms and gates whose rows do not depend on what shares their pass; see ``device.row_matmul``."""

from __future__ import annotations

import torch
import triton
from torch import nn

from services.verifier.triton_kernels.device.row_matmul import add_leaves, multiply
from services.verifier.triton_kernels.device.row_norm import add_and_normalise, gate

# Terms of one product of tiles, columns of a program, and lanes of a norm.
_TERMS, _COLUMNS, _LANES = 64, 64, 1024
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


class RowLinear(nn.Module):
    """Replaces ``nn.Linear`` for inference. Takes and gives [..., in_features] and [..., out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.leaves, self.leaf = leaves_of(*weight.shape)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        count, columns = len(flat), self.out_features
        made = flat.new_empty(count, columns)
        # A program's rows change no bit.
        block = min(_MOST_ROWS, max(_LEAST_ROWS, triton.next_power_of_2(count)))
        split = self.leaves > 1 and count <= _FEW_ROWS
        into = flat.new_empty(self.leaves, count, columns, dtype=torch.float32) if split else made
        bias = made if self.bias is None else self.bias
        grid = (-(-count // block), -(-columns // _COLUMNS), self.leaves if split else 1)
        multiply[grid](
            flat, self.weight, bias, into, count, columns, self.leaf, self.in_features, LEAVES=self.leaves, ROWS=block,
            COLUMNS=_COLUMNS, TERMS=_TERMS, BIAS=self.bias is not None, SPLIT=split,
        )  # fmt: skip
        if split:
            numbers = count * columns
            add_leaves[(-(-numbers // _LANES),)](
                into, bias, made, numbers, columns, LEAVES=self.leaves, BLOCK=_LANES, BIAS=self.bias is not None
            )
        return made.view(*rows.shape[:-1], columns)


def normalise(
    rows: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rounded: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS normalisation of ``rows`` + ``residual``, [..., width] (arXiv:1910.07467); returns the sum too.

    Args:
        rounded: whether a normalised row is rounded to its own type before it is multiplied by the weight.
    """
    rows = rows.contiguous()
    made = torch.empty_like(rows)
    summed = rows if residual is None else torch.empty_like(rows)
    width = rows.shape[-1]
    add_and_normalise[(rows.numel() // width,)](
        rows, rows if residual is None else residual.contiguous(), weight, summed, made, width, eps, BLOCK=_LANES,
        RESIDUAL=residual is not None, ROUNDED=rounded,
    )  # fmt: skip
    return made, summed


def gated(both: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times its second half: [..., 2 * width] to [..., width]."""
    both = both.contiguous()
    width = both.shape[-1] // 2
    made = both.new_empty(*both.shape[:-1], width)
    gate[(both.numel() // (2 * width), -(-width // _LANES))](both, made, width, BLOCK=_LANES)
    return made
