"""Numbers go to a GPU without waiting for it, and come from it without waiting for more; here with a torch told so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.verifier.model.to_device import on_the_way, to_device

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


def test_numbers_from_a_gpu_wait_for_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []

    class Event:
        def record(self) -> None:
            happened.append("recorded")

        def synchronize(self) -> None:
            happened.append("waited")

    class OnGpu:
        device = torch.device("cuda")

        def to(self, device: str, non_blocking: bool) -> torch.Tensor:
            happened.append(("sent", device, non_blocking))
            return torch.tensor([4, 5])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    arrived = on_the_way(OnGpu())  # type: ignore[arg-type]
    assert happened == [("sent", "cpu", True), "recorded"]
    assert arrived() == [4, 5] and happened[2:] == ["waited"]
    assert on_the_way(torch.tensor([7]))() == [7]
