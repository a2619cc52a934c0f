"""Launches ``device.first_greatest``: which token has the greatest logit of each row."""

from __future__ import annotations

import torch
import triton

from services.verifier.kernels.triton.device.first_greatest import first_greatest

# Numbers of a row in one program: few enough that a single row of a large vocabulary keeps half of a GPU busy.
_BLOCK = 2048


def first_of_greatest(logits: torch.Tensor) -> torch.Tensor:
    """As ``services.verifier.choosing.greatest.by_torch``; one launch, or two for rows of more than ``_BLOCK`` logits.

    Args:
        logits: [rows, vocabulary], float32 or bfloat16.
    """
    rows, count = logits.shape
    numbers = places = logits.contiguous()
    while True:
        block = min(_BLOCK, triton.next_power_of_2(count))
        parts = -(-count // block)
        tops = logits.new_empty(rows, parts, dtype=torch.float32)
        firsts = logits.new_empty(rows, parts, dtype=torch.int64)
        first_greatest[(rows, parts)](
            numbers, places, tops, firsts, count, parts, PLACED=places is not numbers, LAST=parts == 1, BLOCK=block
        )
        if parts == 1:
            return firsts[:, 0]
        numbers, places, count = tops, firsts, parts
