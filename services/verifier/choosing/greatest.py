"""Which token has the greatest logit, found where the logits are: by one kernel of ours, or by torch's functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from services.verifier.choosing.own_kernels import own_kernel
from services.verifier.model.target_port import NOT_CHOSEN

# Takes [rows, vocabulary], float32 or bfloat16; see ``by_torch``.
Finder = Callable[[torch.Tensor], torch.Tensor]


def likeliest_of(logits: torch.Tensor) -> list[int]:
    """The first of the greatest logits of each row, [rows, vocabulary]; ``NOT_CHOSEN`` where that is not finite."""
    found: list[int] = first_of_greatest(logits).tolist()
    return found


def first_of_greatest(logits: torch.Tensor) -> torch.Tensor:
    """As ``likeliest_of``, [rows], int64, where the logits are."""
    return (finder_on(logits.device) or by_torch)(logits)


@functools.cache
def finder_on(device: torch.device) -> Finder | None:
    """Our kernel for ``first_of_greatest``; None where it does not run or is not right."""

    def load() -> Finder:
        from services.verifier.kernels.triton import greatest_kernel

        return greatest_kernel.first_of_greatest

    def is_right(finder: Finder) -> bool:
        rows = _trial_rows().to(device)
        return all(torch.equal(finder(own), by_torch(own)) for own in (rows, rows.bfloat16()))

    return own_kernel(device, load, is_right, "the likeliest tokens are found")


def by_torch(logits: torch.Tensor) -> torch.Tensor:
    """The first of the greatest of each row: [rows], int64. ``NOT_CHOSEN`` where it is not finite, as beside NaN."""
    tops = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == tops, ids, len(ids)).amin(-1)
    return torch.where(torch.isfinite(tops[:, 0]), first, NOT_CHOSEN)


def _trial_rows() -> torch.Tensor:
    """Rows of any numbers; of equal ones; with both zeros at the top; and with nothing that can be chosen."""
    rows = torch.randn(7, 5000, generator=torch.Generator().manual_seed(0))
    rows[1] = 3.0
    rows[2] = -rows[2].abs()
    rows[2, [77, 3000]], rows[2, 4000] = -0.0, 0.0
    for row, at, value in ((3, 4999, math.nan), (4, 10, math.inf), (5, 0, -math.nan)):
        rows[row, at] = value
    rows[6] = -math.inf
    return rows
