"""The likeliest ids of rows on a CPU, found by a native kernel; see likeliest.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from services.verifier.kernels.native.library import Library

# The kernel finds no more of a row.
MOST = 64


class LikeliestKernel:
    """Finds with the compiled kernel."""

    def __init__(self, library: Library) -> None:
        self._find = library.functions.outrider_likeliest
        self._find.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_int64] * 2,
            ctypes.c_void_p,
            *[ctypes.c_int64] * 2,
            ctypes.c_void_p,
        ]
        self._find.restype = ctypes.c_int

    def find(self, logits: torch.Tensor, rows: Sequence[int], k: int) -> list[tuple[int, ...]] | None:
        """The ids of the ``k`` greatest logits of ``rows``, greatest first, of equals the first one first.

        Args:
            logits: [all rows, vocabulary], float32, on the CPU; numbers of a row lie side by side.

        Returns:
            None where a row has fewer than ``k`` numbers above -inf, or ``k`` is above ``MOST``.

        Raises:
            ValueError: logits of another type, or a row that is not there, which the kernel itself could not notice.
        """
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            raise ValueError(f"logits are {logits.dtype} of strides {logits.stride()}: must be float32, side by side")
        if not all(0 <= row < len(logits) for row in rows):
            raise ValueError(f"rows are {list(rows)}: there are {len(logits)}")
        asked, found = (ctypes.c_int64 * len(rows))(*rows), (ctypes.c_int64 * (len(rows) * k))()
        sizes = logits.shape[1], logits.stride(0)
        if not self._find(logits.data_ptr(), *sizes, asked, len(rows), k, found):
            return None
        ids = iter(found)
        return list(zip(*[ids] * k, strict=True))
