"""Pipeline stages in processes of their own that are forked from one which has imported all that a stage needs.

A stage that is started anew, as the product starts it (``cluster.ray.stage_actors.launch_child``), computes for five seconds before
it reads its first weight: it imports PyTorch and transformers. Here that is paid once for all stages of a test run. What a stage
does, and what one can do to it (signals, an end in mid-pass), is the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext

import psutil
import pytest

from cluster.ray import stage_actors
from services.verifier.stages import process
from services.verifier.stages.upstream import StageHandle, StageSpec

_CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["services.verifier.stages.process", "transformers.models.llama.modeling_llama"])
_STARTED: list[psutil.Process] = []


def _run(told: str) -> None:
    # In its own session, as the product's: Ctrl-C reaches the tests alone.
    os.setsid()
    sys.argv = ["stage", told]
    process.main()


class _Forked:
    def __init__(self, spec: StageSpec) -> None:
        self._process = _CONTEXT.Process(target=_run, args=(process.spec_to_json(spec),), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        _STARTED.append(psutil.Process(self._process.pid))

    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self, patience_s: float) -> None:
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def launch_fork(spec: StageSpec) -> StageHandle:
    """Start a stage in a forked process. It sees the environment as it was when the first one was started."""
    return _Forked(spec)


def services_fork(patch: pytest.MonkeyPatch) -> None:
    """Let whole services that are built from now on start their stages so."""
    patch.setattr(stage_actors, "launch_child", launch_fork)


def forked_stages() -> list[psutil.Process]:
    """Those that run, in the order in which they were started: the first stage first."""
    return [each for each in _STARTED if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def _end() -> None:
    """A test that fails may leave one frozen, and ``multiprocessing`` would wait for it at the end for ever."""
    for each in forked_stages():
        each.kill()


# After multiprocessing's own, and so run before it.
atexit.register(_end)
