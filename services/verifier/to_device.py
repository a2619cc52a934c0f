"""Numbers of the host on their way to the device of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray


def to_device(
    values: Sequence[Any] | NDArray[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of ``values`` on ``device``; may share the memory of an array or a tensor if that is a CPU.

    A GPU is not waited for. ``torch.tensor(values, device=...)`` would wait until all is done that was launched before,
    so that nothing could be launched behind a pass while it runs. Not run on a GPU yet (docs/gpus.md).
    """
    made = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or not len(made):
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)
