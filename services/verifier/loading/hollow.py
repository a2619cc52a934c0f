"""Builds models without memory for their weights. Other threads are not affected, and may load models meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_M = TypeVar("_M", bound=nn.Module)


class _EmptyTakesNoMemory(TorchFunctionMode):
    """``torch.empty`` gives tensors on the meta device. Like all such modes, it is in force in its own thread only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def without_weights(make: Callable[[], _M]) -> _M:
    """What ``make`` makes, its weights on the meta device and its buffers computed.

    Where buffers are not, the model is made with memory for all.
    """
    made = weights_on_meta(make)
    return make() if any(buffer.is_meta for buffer in made.buffers()) else made


def weights_on_meta(make: Callable[[], _M]) -> _M:
    """What ``make`` makes, its weights on the meta device, its buffers computed, but for some of a few architectures.

    A model makes room for weights by ``torch.empty``, while buffers, which files do not store, are computed from the start.
    (accelerate's ``init_empty_weights`` does the same for all threads at once: it would empty what others load meanwhile.)
    """
    with _EmptyTakesNoMemory():
        return make()
