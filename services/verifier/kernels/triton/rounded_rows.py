"""Rounding of what enters a layer's products to eight bits or four, before them; see ``device.round_rows``."""

from __future__ import annotations

import torch
import triton

from services.model_files.weights.rounded_inputs import InputRounding
from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.round_rows import round_rows

# Of a program, at most; no bit depends on it.
_LANES = 1024


def rounded_rows(rounding: InputRounding, rows: torch.Tensor) -> torch.Tensor:
    """[..., inputs], of the type of ``rows``: the bits of ``rounding.in_float32``."""
    given = rows.contiguous()
    made = torch.empty_like(given)
    size = rounding.size or given.shape[-1]
    if not given.numel():
        return made
    low, high = rounding.codes
    round_rows[(given.numel() // size,)](
        given, made, rounding.scale, 0.0 if rounding.symmetric else rounding.zero, rounding.global_scale or 1.0, SIZE=size,
        BLOCK=min(_LANES, triton.next_power_of_2(size)), LOW=low, HIGH=high, FLOATS=rounding.floats,
        SYMMETRIC=rounding.symmetric, STORED=rounding.stored, FOUR_BITS=rounding.bits == 4,
        POWER=rounding.greatest_power if rounding.powers else 0, **COMPILED,
    )  # fmt: skip
    return made
