"""Launches ``device.noisy_rows``: who wins each row of logits under the law's noise, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.verifier.kernels.triton.device.noisy_rows import noisy_rows
from services.verifier.model.to_device import to_device
from speculation.philox import NoiseStream

# Philox blocks of four tokens in a program.
_BLOCK = 256
_LOW = 0xFFFFFFFF


def noisy_winners(
    logits: torch.Tensor, perhaps: torch.Tensor, seeds: Sequence[int], positions: Sequence[int], stream: NoiseStream
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``services.verifier.choosing.device_choice.winners_by_torch``; rows without NaN."""
    rows, vocabulary = logits.shape
    parts = -(-vocabulary // (4 * _BLOCK))
    keys = [
        [seed & _LOW, seed >> 32, position & _LOW, position >> 32] for seed, position in zip(seeds, positions, strict=True)
    ]
    tops, seconds = (logits.new_empty(rows, parts, dtype=torch.float64) for _ in range(2))
    ids = logits.new_empty(rows, parts, dtype=torch.int64)
    noisy_rows[(rows, parts)](
        logits.contiguous(), perhaps, to_device(keys, logits.device), tops, ids, seconds, vocabulary,
        parts, STREAM=int(stream), BLOCK=_BLOCK,
    )  # fmt: skip
    best, part = tops.max(-1, keepdim=True)
    # The winner's part is represented by its second.
    others = torch.maximum(tops.scatter(-1, part, -torch.inf).amax(-1), seconds.gather(-1, part)[:, 0])
    return best[:, 0], ids.gather(-1, part)[:, 0], others
