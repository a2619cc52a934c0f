"""Floats of four bits (E2M1), of which a block of inputs shares a scale: MXFP4 and NVFP4."""

from __future__ import annotations

import torch

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Numbers that share a scale.
MX_BLOCK, NV_BLOCK = 32, 16


def floats(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] to [..., two numbers for each byte] in float32, the lower half of a byte first."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return torch.tensor(_VALUES)[codes.long()]


def mx_numbers(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The numbers of MXFP4, which bfloat16 holds exactly.

    Args:
        packed: [..., blocks x 16], bytes.
        exponents: [..., blocks], bytes: of a scale's power of two, plus 127.
    """
    numbers = floats(packed).view(*exponents.shape, MX_BLOCK)
    return torch.ldexp(numbers, exponents[..., None].int() - 127).flatten(-2).bfloat16()
