"""Blocks of e4m3 with a scale in float32: the numbers of code x scale, rounded once, or no blocks at all."""

from __future__ import annotations

import pytest
import torch

from services.model_files.weights.quantised.as_blocks import floats_as_blocks
from services.verifier.kernels.native.library import instruction_sets
from services.verifier.kernels.native.linear_kernel import NativeLinear
from tests.kernels.kernels_here import kernels_of

# Outputs, inputs, outputs and inputs that share a scale: one for all, for an output, for a block.
LAYOUTS = [(40, 192, 40, 192), (45, 200, 1, 200), (33, 70, 33, 70), (130, 300, 128, 128), (256, 256, 128, 128)]
Given = tuple[torch.Tensor, torch.Tensor]


def made(outputs: int, inputs: int, rows: int, size: int) -> Given:
    """Codes, every one but NaN among them, minus zero and subnormal ones, too; and scales of each output, of all sizes."""
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    codes.view(-1)[:256] = torch.arange(256)
    codes[(codes & 127) == 127] = 128
    grid = torch.randn(-(-outputs // rows), -(-inputs // size), generator=generator)
    grid *= torch.exp2(torch.randint(-130, 5, grid.shape, generator=generator).float())
    return codes.view(torch.float8_e4m3fn), grid.repeat_interleave(rows, 0)[:outputs]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("instructions", instruction_sets())
def test_kernels_multiply_by_them_with_the_bits_of_floats(instructions: str, layout: tuple[int, int, int, int]) -> None:
    kernels = kernels_of(instructions)
    codes, scales = made(*layout)
    inputs, size = layout[1], layout[3]
    plain = codes.float() * scales.repeat_interleave(size, 1)[:, :inputs]
    blocks = floats_as_blocks(codes, scales, size)
    assert blocks is not None and blocks.finite() and torch.equal(blocks.float(), plain)
    ours, theirs = NativeLinear(kernels, blocks, None), NativeLinear(kernels, plain, None)
    # The weights themselves, since a row of zeros and a one is one of them.
    assert torch.equal(ours(torch.eye(inputs)), plain.T)
    for rows in (1, 3, 8, 64):
        entering = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(ours(entering), theirs(entering))
    # Minus zero and signs of sums, too.
    assert torch.equal(ours(-torch.eye(inputs)).view(torch.int32), theirs(-torch.eye(inputs)).view(torch.int32))


@pytest.mark.parametrize("why", ["nan", "great scales", "no scale", "e5m2", "groups of 16"])
def test_what_blocks_do_not_hold_stays_floats(why: str) -> None:
    codes, scales = made(40, 192, 1, 32)
    size = 32
    if why == "nan":
        codes[3, 5] = float("nan")
    elif why == "great scales":
        scales[3, 1] = 256.0
    elif why == "no scale":
        scales[3, 1] = float("nan")
    elif why == "e5m2":
        codes = codes.float().to(torch.float8_e5m2)
    else:
        size, scales = 16, scales.repeat_interleave(2, 1)
    assert floats_as_blocks(codes, scales, size) is None
