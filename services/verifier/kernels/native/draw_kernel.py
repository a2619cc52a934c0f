"""What one of several parts of the vocabulary tells of draws, on a CPU, by a native kernel; see choose.c."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from services.verifier.kernels.native.choice_kernel import ROWS_OF_A_THREAD, UNDECIDED
from services.verifier.kernels.native.library import Library

# The kernel's LEAD, and twice its ROUNDING, since sums are made in two steps here.
_LEAD, _ROUNDING = 1e-4, 1e-15
# What noise adds at most.
_NOISE = 23.0


class DrawnRow(NamedTuple):
    """A row of the logits, of which any id may be drawn as the token at ``position``."""

    row: int
    position: int
    seed: int
    temperature: float


class _Draw(ctypes.Structure):
    """The struct in choose.h."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        *[(name, ctypes.c_int64) for name in ("row", "position")],
        ("temperature", ctypes.c_double),
    ]


class DrawKernel:
    """Draws with the compiled kernel."""

    def __init__(self, library: Library) -> None:
        self._draw = library.functions.outrider_draw
        self._draw.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64) * 2,
            *[ctypes.c_int64] * 3,
            *[ctypes.c_void_p] * 2,
        ]
        self._draw.restype = None
        self._room = library.functions.outrider_draw_room
        self._room.argtypes = [ctypes.c_int64]
        self._room.restype = ctypes.c_int64
        # Kept between calls: memory that was just allocated is slow.
        self._scratch = torch.empty(0, dtype=torch.float32)

    def best(self, own: torch.Tensor, draws: Sequence[DrawnRow], first: int) -> list[float]:
        """Of each draw three numbers: the greatest sum of logit and noise, its id, and the next sum; -inf: there is none.

        Args:
            own: [rows, part of the vocabulary], float32, on the CPU; numbers of a row lie side by side.
            first: the part's first id.

        Raises:
            ValueError: logits of another type, or a row that is not there, which the kernel itself could not notice.
        """
        rows, length = own.shape
        if own.dtype != torch.float32 or own.stride(1) != 1:
            raise ValueError(f"logits are {own.dtype} of strides {own.stride()}: must be float32, side by side")
        if not all(0 <= draw.row < rows for draw in draws):
            raise ValueError(f"rows are {[draw.row for draw in draws]}: there are {rows}")
        threads = max(1, min(torch.get_num_threads(), len(draws) // ROWS_OF_A_THREAD))
        if len(self._scratch) < (room := threads * int(self._room(length))):
            self._scratch = torch.empty(room, dtype=torch.float32)
        structs = (_Draw * len(draws))(*[_Draw(draw.seed, draw.row, draw.position, draw.temperature) for draw in draws])
        told = (ctypes.c_double * (3 * len(draws)))()
        sizes = length, own.stride(0), first, threads
        self._draw(structs, len(draws), own.data_ptr(), *sizes, self._scratch.data_ptr(), told)
        return list(told)


def leads(parts: Sequence[tuple[float, float, float]]) -> int:
    """The id that is drawn, by what all parts tell of a draw; ``UNDECIDED``: rounding could decide, or a part has none."""
    if not all(best > -math.inf for best, _, _ in parts):
        return UNDECIDED
    ranked = sorted(parts, reverse=True)
    best, token, second = ranked[0]
    second = max(second, *[other for other, _, _ in ranked[1:]])
    return int(token) if best - second > _LEAD + _ROUNDING * (abs(best) + _NOISE) else UNDECIDED
