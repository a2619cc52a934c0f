"""Whether a kernel of ours serves on a device, in the place of torch's functions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

_Kernel = TypeVar("_Kernel")


def own_kernel(
    device: torch.device, load: Callable[[], _Kernel], is_right: Callable[[_Kernel], bool], tokens: str
) -> _Kernel | None:
    """The kernel that ``load`` imports, where it runs and is right; else None, and the log says why.

    Args:
        is_right: whether it finds what torch's functions do.
        tokens: what is found, and how, for the log.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        kernel = load()
        if is_right(kernel):
            return kernel
        reason = "it finds other tokens"
    except Exception as error:
        # Compilers and drivers may fail in any way.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    log.warning("%s by torch's functions, since our kernel does not run: %s", tokens, reason)
    return None
