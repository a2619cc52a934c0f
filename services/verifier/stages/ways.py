"""How activations get from one stage to the next: by NCCL from GPU to GPU, or by gloo through the processors' memory.

Orders and headers always go by gloo, beside them. NCCL has run nowhere yet (docs/gpus.md); the code around it is tested
with a gloo group in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not exported in their types

from speculation.errors import ConfigurationError

GLOO, NCCL = "gloo", "nccl"
_POLL_S = 5e-5


class Way(Protocol):
    """Carries tensors of known type and size, point to point."""

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        ...

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Start to send a contiguous tensor; RuntimeError if the other side is gone."""
        ...

    def receive(self, tensor: torch.Tensor, rank: int, timeout: timedelta) -> None:
        """Fill ``tensor`` with the next one from ``rank``; RuntimeError if that is gone, or takes longer."""
        ...

    def close(self) -> None:
        """Give up what is under way, without a wait for the other side, which may be gone."""
        ...


class GlooWay:
    """Implements ``Way`` through the processors' memory.

    Args:
        group: gloo's; others may use it as well, in the same order on both sides.
        tag: what is sent under one does not wait for what is sent under another.
    """

    device = torch.device("cpu")

    def __init__(self, group: Any, tag: int = 0) -> None:
        self._group, self._tag = group, tag

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        work: dist.Work = self._group.send([tensor], rank, self._tag)
        return work

    def receive(self, tensor: torch.Tensor, rank: int, timeout: timedelta) -> None:
        self._group.recv([tensor], rank, self._tag).wait(timeout)

    def close(self) -> None: ...


class NcclWay:
    """Implements ``Way`` from GPU to GPU.

    NCCL's own guard ends the process where another does not answer. Here it is off: what does not arrive in time is given
    up, and the target rebuilt, as with gloo.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.device = device
        self._group = nccl_group(PrefixStore("activations", store), rank, size)

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        work: dist.Work = self._group.send([tensor], rank, 0)
        return work

    def receive(self, tensor: torch.Tensor, rank: int, timeout: timedelta) -> None:
        work, deadline = self._group.recv([tensor], rank, 0), time.monotonic() + timeout.total_seconds()
        # Its wait only lets the GPU wait, without a limit.
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError(f"nothing has come from stage {rank}")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        # Else the group's destructor waits for what never comes.
        self._group.abort()


def nccl_group(store: Store, rank: int, size: int) -> Any:
    """A group of NCCL's, which leaves faults to us."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # Torch without CUDA has none.
    kind = dist.ProcessGroupNCCL
    return kind(store, rank, size, kind.Options())


def identity(device: torch.device) -> str:
    """What tells a GPU from every other one; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def way_of(identities: Sequence[str]) -> str:
    """``NCCL`` if every stage has a GPU, else ``GLOO``.

    Args:
        identities: of the stages' devices.

    Raises:
        ConfigurationError: two stages are on one GPU.
    """
    for stage, own in enumerate(identities):
        if own and own in identities[:stage]:
            raise two_on_one(len(identities), identities.index(own), stage, own)
    return NCCL if all(identities) else GLOO


def two_on_one(stages: int, first: int, second: int, gpu: str) -> ConfigurationError:
    """What refuses two stages on one GPU."""
    return ConfigurationError(
        (
            f"stages {min(first, second)} and {max(first, second)} are on one GPU ({gpu}), which makes no "
            "room and is slower; give each stage a GPU of its own, or use stages: 1"
        ),
        field="verifier.stages",
        value=stages,
    )


def device_of_stage(device: str, stage: int, stages: int) -> str:
    """The device of a stage: with ``cuda``, and as many GPUs here as there are stages, each takes its own.

    Where a process sees a single GPU, as in an actor of Ray, that is its own already.
    """
    if device == "cuda" and stages > 1 and torch.cuda.device_count() >= stages:
        return f"cuda:{stage}"
    return device
