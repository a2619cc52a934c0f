"""Where what describes captured passes lies: one place on the device, which graphs read, and two on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# Numbers of 16 bytes: what kernels read begins at a multiple of them, or Triton would compile the kernels once more.
_ALIGNED = 4


class PassBuffers:
    """Passes take turns: each is written on the host, and one copy takes it to the device, behind what was launched before.

    The two places on the host take turns as well, so that a pass can be laid out while another is on its way. Nothing else
    is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = torch.empty(0, dtype=torch.int32, device=device)
        self._staged = [torch.empty(0, dtype=torch.int32)] * 2
        self._arrays: list[NDArray[np.int32]] = [each.numpy() for each in self._staged]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def reserve(self, rows: int, numbers: int) -> PassPlace:
        """The place of passes of so many rows and so many numbers. A larger one later lies elsewhere."""
        ahead = -(-rows // _ALIGNED) * _ALIGNED
        if len(self._on_device) < ahead + numbers:
            self._on_device = self._on_device.new_zeros(ahead + numbers)
            pinned = self._device.type == "cuda"
            self._staged = [torch.zeros(ahead + numbers, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
            self._arrays = [each.numpy() for each in self._staged]
            self._sent = [None, None]
        return PassPlace(rows=rows, ahead=ahead, held=self._on_device[: ahead + numbers])

    def next(self, place: PassPlace) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Where the coming pass is to be written on the host: [rows] tokens, and all that may describe it."""
        if (sent := self._sent[self._turn]) is not None:
            # Of the pass before the last one: it has long arrived.
            sent.synchronize()
        here = self._arrays[self._turn]
        return here[: place.rows], here[place.ahead : len(place.held)]

    def send(self, place: PassPlace, numbers: int) -> None:
        """Take what was written to the device, ``numbers`` of the description."""
        end = place.ahead + numbers
        place.held[:end].copy_(self._staged[self._turn][:end], non_blocking=True)
        if self._device.type == "cuda":
            event = self._sent[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._sent[self._turn] = event
        self._turn = 1 - self._turn


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PassPlace:
    """Where a captured pass has its tokens, and behind them its description, on the device.

    Attributes:
        ahead: where the description begins.
    """

    rows: int
    ahead: int
    held: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """[rows]."""
        return self.held[: self.rows]

    @property
    def description(self) -> torch.Tensor:
        """All that may describe it."""
        return self.held[self.ahead :]
