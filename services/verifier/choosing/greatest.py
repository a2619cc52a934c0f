"""Which token has the greatest logit, found where the logits are: by one kernel of ours, or by torch's functions."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import torch

from services.verifier.model.target_port import NOT_CHOSEN

log = logging.getLogger(__name__)

_Kernel = TypeVar("_Kernel")


def own_kernel(
    device: torch.device, load: Callable[[], _Kernel], is_right: Callable[[_Kernel], bool], tokens: str
) -> _Kernel | None:
    """The kernel that ``load`` imports, where it runs and is right; else None, and the log says why.

    Args:
        is_right: whether it finds what torch's functions do.
        tokens: what is found, and how, for the log.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        kernel = load()
        if is_right(kernel):
            return kernel
        reason = "it finds other tokens"
    except Exception as error:
        # Compilers and drivers may fail in any way.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    log.warning("%s by torch's functions, since our kernel does not run: %s", tokens, reason)
    return None


# For the log.
TOKENS = "the likeliest tokens are found"
# Takes [rows, vocabulary], float32 or bfloat16; see ``by_torch``.
Finder = Callable[[torch.Tensor], torch.Tensor]


def first_of_greatest(logits: torch.Tensor) -> torch.Tensor:
    """As ``by_torch``, by our kernel where it runs."""
    return (finder_on(logits.device) or by_torch)(logits)


@functools.cache
def finder_on(device: torch.device) -> Finder | None:
    """Our kernel for ``first_of_greatest``; None where it does not run or is not right."""

    def load() -> Finder:
        from services.verifier.kernels.triton import choice_kernels

        return choice_kernels.first_of_greatest

    return own_kernel(device, load, lambda finder: is_right(finder, trial_rows().to(device)), TOKENS)


def is_right(finder: Finder, rows: torch.Tensor) -> bool:
    """Whether it finds in ``rows``, [rows, vocabulary], what torch's functions do, also where they are rounded."""
    return all(torch.equal(finder(own), by_torch(own)) for own in (rows, rows.bfloat16()))


def by_torch(logits: torch.Tensor) -> torch.Tensor:
    """The first of the greatest of each row: [rows], int64. ``NOT_CHOSEN`` where it is not finite, as beside NaN."""
    tops = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == tops, ids, len(ids)).amin(-1)
    return torch.where(torch.isfinite(tops[:, 0]), first, NOT_CHOSEN)


def trial_rows() -> torch.Tensor:
    """Rows of any numbers; of equal ones; with both zeros at the top; and with nothing that can be chosen."""
    rows = torch.randn(7, 5000, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    rows[1] = 3.0
    rows[2] = -rows[2].abs()
    rows[2, [77, 3000]], rows[2, 4000] = -0.0, 0.0
    for row, at, value in ((3, 4999, math.nan), (4, 10, math.inf), (5, 0, -math.nan)):
        rows[row, at] = value
    rows[6] = -math.inf
    return rows
