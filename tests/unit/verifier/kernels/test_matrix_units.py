"""The model of Hopper's matrix units in which kernels are interpreted, against Microsoft's bit-accurate one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("mmasim")
from mmasim.arithmetic.fdpa import MMA_T_FDPA

from tests.kernels import triton_interpreter
from tests.kernels.triton_interpreter import mma

# What mmasim.nv_ptx.MMA("Hopper", "m16n8k16.f32.bf16.bf16.f32") is made of; its module compiles C++ on import.
HOPPER = MMA_T_FDPA(25, "RZ-FP32", 16, -133, "bf16", "bf16")
TILES = 200


def tiles() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of 16 rows, 8 columns and 32 terms, whose sizes differ widely; some are zero, some too small for normal numbers."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int, spread: float) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator) * torch.exp2(spread * torch.randn(shape, generator=generator))
        return numbers * (torch.rand(shape, generator=generator) > 0.05)

    found = []
    for number in range(TILES):
        spread = float(number % 20)
        factor = 2.0**-64 if number % 10 == 9 else 1.0
        found.append(
            (
                (some(16, 32, spread=spread) * factor).bfloat16(),
                (some(32, 8, spread=spread) * factor).bfloat16(),
                some(16, 8, spread=spread) * factor**2,
            )
        )
    return found


def differing() -> int:
    """Elements that differ from mmasim's, of all tiles."""
    count = 0
    for left, right, before in tiles():
        expected = HOPPER(left, right, before).numpy()
        made = mma(left.float().numpy(), right.float().numpy(), before.numpy())
        count += int((made.view(np.int32) != expected.view(np.int32)).sum())
    return count


def test_products_are_those_of_the_accurate_model() -> None:
    assert differing() == 0


@pytest.mark.parametrize("bits", [24, 26])
def test_a_bit_more_or_less_would_be_seen(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_interpreter, "_KEPT", bits)
    assert differing() > 0.01 * TILES * 16 * 8
