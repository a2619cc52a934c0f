"""A stand-in for CUDA graphs on a CPU: every operation is recorded with its tensors, and done again over what these hold.

As with a graph, Python does not run again: sizes, slices and numbers of the host stay what they were, and what is made lies
where it lay. What would wait for the device is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

Result = TypeVar("Result")

_WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


class RecordedGraph(TorchDispatchMode):
    """Records within a ``with`` block.

    Attributes:
        replays: how often it was replayed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        """Do all of it again."""
        self.replays += 1
        for func, args, kwargs, made in self._calls:
            for before, now in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():
                    before.copy_(now)


def recorded(run: Callable[[], Result]) -> tuple[RecordedGraph, Result]:
    """As ``services.machine.captured.captured``."""
    run()
    graph = RecordedGraph()
    with graph:
        made = run()
    return graph, made
