"""Numbers go to a GPU without waiting for it; here with a torch that is told so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.verifier.to_device import to_device

CPU = torch.device("cpu")


def test_values_and_types() -> None:
    assert to_device([3, 2**33], CPU).tolist() == [3, 2**33]
    assert to_device([], CPU, torch.int64).dtype == torch.int64
    assert to_device([0.5], CPU, torch.float32).dtype == torch.float32
    assert to_device(np.array([1, 2], dtype=np.int32), CPU).dtype == torch.int32


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        asked.append("pinned")
        return tensor

    def moved(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        asked.append((device.type, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    assert to_device([1, 2], torch.device("cuda")).tolist() == [1, 2]
    assert asked == ["pinned", ("cuda", True)]
