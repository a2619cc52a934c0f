"""Passes laid out for captured graphs, and launched on a device that computes nothing and takes a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from services.verifier.attention.calls import Pass
from services.verifier.attention.fixed import Largest
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.graphs import Graphs, Keep, Made
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError


class NullDevice:
    """Where passes run one after the other, ``seconds`` each; what they would launch is not done. Implements ``Graph``.

    Attributes:
        launches: how many passes there were.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ready_at = 0.0
        self.launches = 0

    def replay(self) -> None:
        self.launches += 1
        self._ready_at = max(self._ready_at, time.perf_counter()) + self._seconds

    def captured(self, run: Callable[[], Made]) -> tuple[NullDevice, Made]:
        """As ``services.machine.captured.captured``."""
        made = run()
        self.launches = 0
        return self, made

    def wait(self) -> None:
        """Until the last pass is done. Other threads run meanwhile."""
        if (left := self._ready_at - time.perf_counter()) > 0:
            time.sleep(left)


class GpuLayout:
    """Lays passes out as a GPU's target does: buckets, descriptions in fixed buffers, and the launch.

    Args:
        seconds: that a pass takes on the device.

    Raises:
        ConfigurationError: Triton is not installed, by whose kernels passes are laid out.
    """

    def __init__(self, pool: KVPool, largest: Largest, seconds: float) -> None:
        try:
            from services.verifier.kernels.triton.tree_pass import TritonBuckets
        except ImportError as error:
            raise ConfigurationError(
                "needs triton, for whose kernels passes are laid out", field="--layout", value="gpu"
            ) from error
        self.device = NullDevice(seconds)
        self._buckets = TritonBuckets(pool)
        self._graphs = Graphs(self._buckets, _nothing, torch.empty(0, dtype=torch.int64), capture=self.device.captured)
        self._graphs.capture(largest, [()])

    def launch(self, batch: Sequence[Rows]) -> bool:
        """Lay a pass out and launch it. Returns whether a graph held it; prompts are launched kernel by kernel."""
        replay = self._graphs.lay_out(batch)
        if replay is None:
            self._buckets.launched(batch, 0)
            self.device.replay()
            return False
        replay(None)
        return True


def _nothing(laid_out: Pass, given: torch.Tensor, layers: Sequence[int], keep: Keep) -> Made:
    return Made(given[:, None], {})
