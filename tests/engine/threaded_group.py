"""A group of gloo's that behaves as NCCL's does: nothing but ``is_completed`` says that something has arrived."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from services.verifier.stages import exchange, ways
from services.verifier.stages.upstream import StageHandle, StageSpec
from tests.engine.stage_forks import launch_fork


class Receiving:
    """What NCCL's ``recv`` returns: ``wait`` comes back at once, only the GPU would wait."""

    def __init__(self, work: Any) -> None:
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._wait, args=[work], daemon=True)
        self._thread.start()

    def _wait(self, work: Any) -> None:
        try:
            work.wait(timedelta(days=1))
        except RuntimeError as error:
            self._failed.append(error)

    def is_completed(self) -> bool:
        return not self._thread.is_alive() and not self._failed

    def wait(self) -> None:
        pass


class ThreadedGroup:
    """Takes the place of ``ProcessGroupNCCL``; the tensors are on the CPU."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._group = ways.gloo_group(store, rank, size, timedelta(days=1))
        self.aborted, self.gathered = False, 0

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        work: dist.Work = self._group.send(tensors, rank, tag)
        return work

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Receiving:
        return Receiving(self._group.recv(tensors, rank, tag))

    def _allgather_base(self, made: torch.Tensor, own: torch.Tensor) -> dist.Work:
        self.gathered += 1
        work: dist.Work = self._group._allgather_base(made, own)
        return work

    def abort(self) -> None:
        self.aborted = True


def as_nccl() -> None:
    """Let every device be a GPU of its own in this process, and gloo carry what NCCL would."""
    exchange.identity = ways.identity = lambda device: f"GPU of {os.getpid()}"
    ways.nccl_group = ThreadedGroup


def launch_as_nccl(spec: StageSpec) -> StageHandle:
    """Start a stage in a forked process in which ``as_nccl`` holds."""
    return launch_fork(spec, as_nccl)
