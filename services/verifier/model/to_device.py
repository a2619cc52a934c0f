"""Numbers on their way between the host and the device of a pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray


def to_device(
    values: Sequence[Any] | NDArray[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of ``values`` on ``device``; may share the memory of an array or a tensor if that is a CPU.

    A GPU is not waited for. ``torch.tensor(values, device=...)`` would wait until all is done that was launched before,
    so that nothing could be launched behind a pass while it runs.
    """
    made = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or not len(made):
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


class Timed:
    """What gives numbers that are waited for, and the seconds that this took."""

    def __init__(self, gives: Callable[[], list[Any]]) -> None:
        self._gives = gives
        self.seconds = 0.0

    def __call__(self) -> list[Any]:
        start = time.perf_counter()
        try:
            return self._gives()
        finally:
            self.seconds += time.perf_counter() - start


def on_the_way(numbers: torch.Tensor, rows: Sequence[int] | None = None) -> Callable[[], list[Any]]:
    """Send numbers to the host behind what is launched by now; the function waits for them, and for nothing launched later.

    From a CPU nothing is sent: it must be called before they change.

    Args:
        rows: those that the function gives; None: all.
    """
    if rows is not None:
        of_all = on_the_way(numbers)
        return lambda: [found[row] for found in (of_all(),) for row in rows]
    if numbers.device.type != "cuda":
        return numbers.tolist
    # To pinned memory, which torch takes for such a copy.
    copy = numbers.to("cpu", non_blocking=True)
    sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
    sent.record()

    def arrived() -> list[Any]:
        sent.synchronize()
        found: list[Any] = copy.tolist()
        return found

    return arrived
