"""How activations get from one stage to the next: by NCCL from GPU to GPU, or by gloo through the processors' memory.

Orders and headers always go by gloo, beside them. NCCL has run nowhere yet (docs/gpus.md); the code around it is tested
with a gloo group in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, though not exported in their types

from speculation.errors import ConfigurationError, TargetLost

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


class RankGroup:
    """Gathers between the ranks of one stage, each on a GPU (``stage_ranks.Gathers``).

    A gather is one more kernel on the GPU's stream, for which the processor does not wait; so passes can be captured with
    theirs, by all ranks in one order.

    Args:
        stage: of which these are the ranks.
    """

    def __init__(self, store: Store, stage: int, rank: int, count: int) -> None:
        self._count = count
        self._group = nccl_group(PrefixStore(f"ranks of stage {stage}", store), rank, count)

    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        """[ranks, ...]; ``within_s`` is not looked at: who is there was asked before the pass (``StageRanks.agree``).

        Raises:
            TargetLost: a rank is known to be gone.
        """
        first, *others = own.shape
        made = own.new_empty(self._count * first, *others)
        try:
            self._group._allgather_base(made, own.contiguous()).wait()
        except RuntimeError as error:
            raise TargetLost("a rank of the target is gone") from error
        return made.view(self._count, *own.shape)

    def close(self) -> None:
        """As ``NcclWay.close``."""
        self._group.abort()


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of gloo's, whose threads do not take a processor from another thread as soon as they wake.

    While a sender holds a connection's lock, gloo's thread asks for it without a pause. Woken by what was just sent, it
    would take the sender's processor, and ask until its turn is over: half of a target's processor time where cores are few.
    """
    # Both are the calling thread's own; its threads begin with them.
    ordinary = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER
    try:
        if ordinary:
            # Some sandboxes forbid it.
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        # Its own methods are missing in torch's types.
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    finally:
        if ordinary:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


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
    """``NCCL`` if every process has a GPU, else ``GLOO``.

    Args:
        identities: of the devices of the target's processes.

    Raises:
        ConfigurationError: two processes are on one GPU.
    """
    for process, own in enumerate(identities):
        if own and own in identities[:process]:
            raise two_on_one(len(identities), identities.index(own), process, own)
    return NCCL if all(identities) else GLOO


def two_on_one(processes: int, first: int, second: int, gpu: str) -> ConfigurationError:
    """What refuses two processes of a target on one GPU."""
    return ConfigurationError(
        (
            f"processes {min(first, second)} and {max(first, second)} of the {processes} are on one GPU ({gpu}), which "
            "makes no room and is slower; give each a GPU of its own, or use fewer stages or ranks"
        ),
        about="verifier.stages and verifier.tensor_parallel_size",
    )


def device_of_process(device: str, process: int, processes: int) -> str:
    """The device of a process: with ``cuda``, and as many GPUs here as the target has processes, each takes its own.

    Where a process sees a single GPU, as in an actor of Ray, that is its own already.
    """
    if device == "cuda" and processes > 1 and torch.cuda.device_count() >= processes:
        return f"cuda:{process}"
    return device
