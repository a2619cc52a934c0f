"""Sums whose order of additions is fixed by how many numbers they have."""

from __future__ import annotations

import torch


def folded(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over a dimension: its second half is added to the first one until one number is left."""
    while (count := numbers.shape[dim]) > 1:
        half = count // 2
        sums = numbers.narrow(dim, 0, half) + numbers.narrow(dim, half, half)
        numbers = torch.cat([sums, numbers.narrow(dim, count - 1, 1)], dim=dim) if count % 2 else sums
    return numbers.select(dim, 0)
