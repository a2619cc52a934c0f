"""Blocks with a zero point each: the numbers of (code - zero point) x scale in float32, or no blocks at all."""

from __future__ import annotations

import pytest
import torch

from services.model_files.weights.quantised.as_blocks import as_blocks
from services.model_files.weights.stored_blocks import StoredBlocks
from services.verifier.kernels.native.library import instruction_sets
from services.verifier.kernels.native.linear_kernel import NativeLinear
from tests.kernels.kernels_here import kernels_of

OUTPUTS, INPUTS = 40, 192


def made(bits: int, size: int, zeros: str, signed: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, zero points and scales."""
    generator = torch.Generator().manual_seed(bits * size)
    low = -(1 << (bits - 1)) if signed else 0
    codes = torch.randint(low, low + (1 << bits), (OUTPUTS, INPUTS), generator=generator)
    groups = (OUTPUTS, INPUTS // size)
    scales = (torch.randn(groups, generator=generator) / 50).half()
    whole = torch.randint(low, low + (1 << bits), groups, generator=generator)
    if zeros == "whole":
        return codes, whole, scales
    return codes, (whole + torch.rand(groups, generator=generator)).half(), scales


def numbers(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    wide = (one.float().repeat_interleave(size, 1) for one in (zeros, scales))
    return (codes.float() - next(wide)) * next(wide)


CASES = [
    (4, 16, "whole"),
    (3, 16, "floats"),
    (2, 48, "whole"),
    (4, 32, "whole"),
    (4, 64, "floats"),
    (3, INPUTS, "whole"),
    (2, 96, "floats"),
    (8, 32, "floats"),
    (8, INPUTS, "whole"),
]


@pytest.mark.parametrize(("bits", "size", "zeros"), CASES)
def test_blocks_hold_the_numbers(bits: int, size: int, zeros: str) -> None:
    given = made(bits, size, zeros)
    blocks = as_blocks(*given, size)
    kind, each = ("Q8_Z", 36) if bits == 8 else ("Q4_Z", 20) if size % 32 == 0 else ("Q4_H", 24)
    assert blocks is not None and blocks.kind == kind
    assert blocks.raw.shape == (OUTPUTS, INPUTS // 32 * each)
    assert torch.equal(blocks.float(), numbers(*given, size))


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_with_a_sign(bits: int) -> None:
    given = made(bits, 64, "whole", signed=True)
    blocks = as_blocks(*given, 64)
    assert blocks is not None and torch.equal(blocks.float(), numbers(*given, 64))


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("bits", "size", "zeros"), CASES)
@pytest.mark.parametrize("instructions", instruction_sets())
def test_kernels_multiply_by_them_with_the_bits_of_floats(
    instructions: str, bits: int, size: int, zeros: str, rows: int
) -> None:
    kernels = kernels_of(instructions)
    given = made(bits, size, zeros)
    blocks, plain = as_blocks(*given, size), numbers(*given, size)
    assert blocks is not None
    entering = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows))
    expected = NativeLinear(kernels, plain, None)(entering)
    assert torch.equal(NativeLinear(kernels, blocks, None)(entering), expected)
    # The weights themselves, since a row of zeros and a one is one of them.
    one_hot = torch.eye(INPUTS)[:rows]
    assert torch.equal(NativeLinear(kernels, blocks, None)(one_hot), plain.T[:rows])
    # A zero point that is one off in one block of one output shows.
    raw = blocks.raw.clone()
    at = slice(6, 8) if blocks.kind == "Q4_H" else slice(2, 4)
    raw[7, at] = (raw[7, at].view(torch.float16) + 1).view(torch.uint8)
    wrong = NativeLinear(kernels, StoredBlocks(raw, blocks.kind, INPUTS), None)(entering)
    assert (wrong != expected).any(0).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(
    "why",
    [
        "float32 scales",
        "groups of 8",
        "groups of 16 in eight bits",
        "zeros beyond float16",
        "small zeros",
        "great zeros",
        "codes of nine bits",
    ],
)
def test_what_blocks_do_not_hold_stays_floats(why: str) -> None:
    codes, zeros, scales = made(4, 32, "floats")
    size = 32
    if why == "float32 scales":
        scales = scales.float() * 1.0001
    elif why == "groups of 8":
        size, zeros, scales = 8, zeros.repeat_interleave(4, 1), scales.repeat_interleave(4, 1)
    elif why == "groups of 16 in eight bits":
        size, zeros, scales = 16, zeros.repeat_interleave(2, 1), scales.repeat_interleave(2, 1)
        codes[0, 0] = 255
    elif why == "zeros beyond float16":
        zeros = zeros.float() + 1e-4
    elif why == "small zeros":
        # The difference from a code would be rounded before it is multiplied.
        zeros[0, 0] = 2.0**-22
    elif why == "great zeros":
        zeros[0, 0] = 300.0
    else:
        codes[0, 0] = 256
    assert as_blocks(codes, zeros, scales, size) is None
