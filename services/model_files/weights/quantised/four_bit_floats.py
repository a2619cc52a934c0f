"""Floats of four bits (E2M1), of which a block of inputs shares a scale: MXFP4 and NVFP4."""

from __future__ import annotations

import torch

from services.model_files.weights.quantised.as_blocks import codes_as_blocks
from services.model_files.weights.stored_blocks import TABLES, Weight

# Numbers that share a scale.
MX_BLOCK, NV_BLOCK = 32, 16


def codes_of(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] to [..., two codes for each byte], the lower half of a byte first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def floats(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] to [..., two numbers for each byte] in float32, the lower half of a byte first."""
    return torch.tensor(TABLES["E2M1"], dtype=torch.float32)[codes_of(packed).long()]


def mx_numbers(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The numbers of MXFP4, which bfloat16 holds exactly.

    Args:
        packed: [..., blocks x 16], bytes.
        exponents: [..., blocks], bytes: of a scale's power of two, plus 127.
    """
    numbers = floats(packed).view(*exponents.shape, MX_BLOCK)
    return torch.ldexp(numbers, exponents[..., None].int() - 127).flatten(-2).bfloat16()


def mx_weight(packed: torch.Tensor, exponents: torch.Tensor) -> Weight:
    """A matrix in MXFP4: blocks, or numbers, where a scale is too great for what multiplies by blocks.

    Args:
        packed: [outputs, blocks x 16], bytes.
        exponents: [outputs, blocks], as in ``mx_numbers``.
    """
    blocks = codes_as_blocks("MXFP4", codes_of(packed), exponents)
    return blocks if blocks.finite() else mx_numbers(packed, exponents)
