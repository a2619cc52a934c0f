"""Segments are read many at once and merged in ascending order: the bits of merging them one after the other."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from services.verifier.kernels.triton.device.tree_attend import _divided, _merged, merge
from tests.kernels.triton_interpreter import hopper

pytestmark = pytest.mark.exhaustive

SEGMENT, HEADS, VALUE, VALUES, UNIT = 512, 2, 20, 32, 0.3
# Fewer segments than are read at once, as many, and more.
COUNTS = (1, 2, 15, 16, 17, 33, 70)


@triton.jit  # type: ignore[untyped-decorator]
def one_by_one(  # type: ignore[no-untyped-def]
    made, tops, totals, partial, sink, unit, segments, first, BACKWARDS: tl.constexpr, SINKS: tl.constexpr
):  # fmt: skip
    """The definition, for one head of one row; BACKWARDS: a fault."""
    dims = tl.arange(0, 32)
    lane = tl.arange(0, 1)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, 32), tl.float32)
    for number in range(first, segments):
        segment = segments - 1 - (number - first) if BACKWARDS else number
        own = tl.load(partial + (segment + lane)[:, None] * 20 + dims[None, :], mask=dims[None, :] < 20, other=0.0)
        top, total, sums = _merged(
            top, total, sums, tl.load(tops + segment + lane), tl.load(totals + segment + lane), own, unit
        )
    result = _divided(top, total, sums, tl.load(sink + lane) * 1.4426950408889634, unit, SINKS)
    tl.store(made + dims[None, :], result, mask=dims[None, :] < 20)


class Sums:
    """Of one row's segments, with some in which it sees nothing, and zeros of both signs."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.count = count
        self.tops = 20 * torch.randn(1, HEADS, count, generator=generator)
        self.totals = 1 + 60 * torch.rand(1, HEADS, count, generator=generator)
        self.partial = torch.randn(1, HEADS, count, VALUE, generator=generator) * self.totals[..., None]
        self.partial[..., 3], self.partial[..., 4] = 0.0, -0.0
        if count > 3:
            self.tops[0, 0, :2], self.totals[0, 0, :2], self.partial[0, 0, :2] = float("-inf"), 0.0, 0.0
        self.sinks = torch.tensor([0.5, 90.0])

    def merged(self, window: int, sinks: bool) -> torch.Tensor:
        made = torch.full((1, HEADS, VALUE), 7.0)
        # Its position, and where its sums begin.
        meta = torch.tensor([self.count * SEGMENT - 5, 0], dtype=torch.int32)
        with hopper():
            merge[(1, HEADS)](
                made, self.tops, self.totals, self.partial, self.sinks, meta, UNIT, 1, HEADS=HEADS, VALUE=VALUE,
                VALUES=VALUES, WINDOW=window, CHUNK=0, SINKS=sinks,
            )  # fmt: skip
        return made[0]

    def in_order(self, first: int, sinks: bool, backwards: bool = False) -> torch.Tensor:
        made = torch.full((HEADS, VALUE), 7.0)
        with hopper():
            for head in range(HEADS):
                one_by_one[(1,)](
                    made[head], self.tops[0, head], self.totals[0, head], self.partial[0, head], self.sinks[head:], UNIT,
                    self.count, first, BACKWARDS=backwards, SINKS=sinks,
                )  # fmt: skip
        return made


def bits(numbers: torch.Tensor) -> list[int]:
    """Zeros of both signs differ."""
    flat: list[int] = numbers.contiguous().view(torch.int32).flatten().tolist()
    return flat


@pytest.mark.parametrize("count", COUNTS)
def test_the_bits_are_those_of_one_after_the_other(count: int) -> None:
    sums = Sums(count)
    assert bits(sums.merged(0, sinks=False)) == bits(sums.in_order(0, sinks=False))
    # A window begins in a later segment, not where reading would begin without it.
    first = count // 3
    window = (count - first) * SEGMENT - 5
    assert bits(sums.merged(window, sinks=True)) == bits(sums.in_order(first, sinks=True))


def test_another_order_is_seen() -> None:
    sums = Sums(17)
    right, wrong = sums.merged(0, sinks=False), sums.in_order(0, sinks=False, backwards=True)
    assert torch.allclose(right, wrong, atol=1e-4) and bits(right) != bits(wrong)
