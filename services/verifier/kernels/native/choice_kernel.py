"""Chooses tokens on a CPU by a native kernel (choose.c). What rounding could change is left to the caller."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from services.verifier.choosing.walks import ChoicePoint
from services.verifier.kernels.native.library import Library

# What the kernel answers where the caller must choose.
UNDECIDED = -1
# Fewer are not worth waking a thread, which would be waited for if another process has its core.
ROWS_OF_A_THREAD = 32


class ChoiceKernel:
    """Chooses with the compiled kernel."""

    def __init__(self, library: Library) -> None:
        functions = library.functions
        self._choose = functions.outrider_choose
        self._choose.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64) * 2,
            *[ctypes.c_int64] * 2,
            *[ctypes.c_void_p] * 2,
        ]
        self._choose.restype = None
        self._room = functions.outrider_choose_room
        self._room.argtypes = [ctypes.c_int64]
        self._room.restype = ctypes.c_int64
        # Kept between calls: memory that was just allocated is slow.
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._made_for = (0, 0)

    def choose(self, logits: torch.Tensor, points: Sequence[ChoicePoint]) -> list[int]:
        """The token at each point, or ``UNDECIDED``.

        Args:
            logits: [rows, vocabulary], float32, on the CPU; numbers of a row lie side by side.

        Raises:
            ValueError: logits of another type, or a point of no row, which the kernel itself could not notice.
        """
        rows, vocabulary = logits.shape
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            raise ValueError(f"logits are {logits.dtype} of strides {logits.stride()}: must be float32, side by side")
        fields: list[int] = []
        held = []
        for point in points:
            if not 0 <= point.row < rows:
                raise ValueError(f"row is {point.row}: there are {rows}")
            counts = point.request.penalties.counts
            if counts is None:
                fields += (point.request.address, 0, 0, 0, point.row, point.position)
                continue
            ids, occurrences = counts.after(point.path)
            held.append((ids, occurrences))
            addresses = (ids.ctypes.data, occurrences.ctypes.data) if point.path else counts.addresses
            fields += (point.request.address, *addresses, len(ids), point.row, point.position)
        # Six fields of 64 bits each: the struct in choose.h.
        structs = (ctypes.c_int64 * len(fields))(*fields)
        threads = max(1, min(torch.get_num_threads(), len(points) // ROWS_OF_A_THREAD))
        if (vocabulary, threads) != self._made_for:
            self._scratch = torch.empty(threads * int(self._room(vocabulary)), dtype=torch.float32)
            self._made_for = vocabulary, threads
        choices = (ctypes.c_int64 * len(points))()
        pointers = self._scratch.data_ptr(), choices
        self._choose(structs, len(points), logits.data_ptr(), vocabulary, logits.stride(0), threads, *pointers)
        return list(choices)
