"""How the C library hands memory back."""

from __future__ import annotations

import ctypes
import sys

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Make glibc keep freed tensors of up to 32 MiB for the next ones.

    Otherwise it gives them back to the system, and the next tensor's pages are cleared one fault at a time: that costs more
    than most of what is computed on them. Does nothing on other systems.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_TOP_PAD, 128 << 20)
