"""Hidden states that stay on the device that made them, for a drafter that computes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from speculation.types import HeldNumbers


@dataclass(frozen=True, eq=False, slots=True)
class DeviceStates:
    """Implements ``HeldNumbers``.

    Attributes:
        numbers: [rows, width], float16 or bfloat16. Nobody changes them.
    """

    numbers: torch.Tensor

    def __len__(self) -> int:
        return self.numbers.nbytes

    def __bytes__(self) -> bytes:
        return self.numbers.cpu().view(torch.int16).numpy().astype("<i2").tobytes()

    def rows(self, begin: int, end: int) -> DeviceStates:
        return part_of(self.numbers, begin, end)

    def columns(self, parts: Sequence[range]) -> DeviceStates:
        return DeviceStates(torch.cat([self.numbers[:, part.start : part.stop] for part in parts], dim=1))

    def followed_by(self, others: Sequence[HeldNumbers]) -> DeviceStates:
        return DeviceStates(torch.cat([self.numbers, *(cast(DeviceStates, other).numbers for other in others)]))


def part_of(numbers: torch.Tensor, begin: int, end: int) -> DeviceStates:
    """Rows in memory of their own, unless they are all: whoever drops the others frees them, as it counts them."""
    return DeviceStates(numbers if end - begin == len(numbers) else numbers[begin:end].clone())


def apart(rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """So many of ``rows`` [all of them, width] each, in memory of their own: whoever keeps some does not keep the others.

    One kernel copies them on a GPU.
    """
    own = [rows.new_empty(size, rows.shape[1]) for size in sizes]
    torch.split_with_sizes_copy(rows, list(sizes), dim=0, out=own)
    return own
