"""Launches the kernels that choose a token of each row: the greatest logit, or the winner under the noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.noisy_rows import first_greatest, noisy_rows
from services.verifier.model.to_device import to_device
from speculation.philox import NoiseStream

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
            numbers,
            places,
            tops,
            firsts,
            count,
            parts,
            PLACED=places is not numbers,
            LAST=parts == 1,
            BLOCK=block,
            **COMPILED,
        )
        if parts == 1:
            return firsts[:, 0]
        numbers, places, count = tops, firsts, parts


# Philox blocks of four tokens in a program.
_NOISE_BLOCK = 256
_LOW = 0xFFFFFFFF


def noisy_winners(
    logits: torch.Tensor,
    perhaps: torch.Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    stream: NoiseStream,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``services.verifier.choosing.device_choice.winners_by_torch``; rows without NaN."""
    rows, vocabulary = logits.shape
    # A part of a vocabulary may begin within a block of noise.
    parts = -(-(first % 4 + vocabulary) // (4 * _NOISE_BLOCK))
    keys = [
        [seed & _LOW, seed >> 32, position & _LOW, position >> 32] for seed, position in zip(seeds, positions, strict=True)
    ]
    tops, seconds = (logits.new_empty(rows, parts, dtype=torch.float64) for _ in range(2))
    ids = logits.new_empty(rows, parts, dtype=torch.int64)
    noisy_rows[(rows, parts)](
        logits.contiguous(), perhaps, to_device(keys, logits.device), tops, ids, seconds, vocabulary,
        parts, first, STREAM=int(stream), BLOCK=_NOISE_BLOCK, **COMPILED,
    )  # fmt: skip
    best, part = tops.max(-1, keepdim=True)
    # The winner's part is represented by its second.
    others = torch.maximum(tops.scatter(-1, part, -torch.inf).amax(-1), seconds.gather(-1, part)[:, 0])
    return best[:, 0], ids.gather(-1, part)[:, 0], others
