"""Pipeline stages in processes of their own that are forked (``tests.running.forks``): what a stage does, and what one can do to it, is as in
one that the product starts (``cluster.ray.stage_actors.launch_child``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import psutil
import pytest

from cluster.ray import stage_actors
from services.verifier.stages import process
from services.verifier.stages.upstream import StageHandle, StageSpec
from tests.running.forks import CONTEXT, STARTED, running_forks

_STAGES: set[int] = set()


def _run(told: str, prepare: Callable[[], None] | None) -> None:
    # In its own session, as the product's: Ctrl-C reaches the tests alone.
    os.setsid()
    if prepare is not None:
        prepare()
    sys.argv = ["stage", told]
    process.main()


class _Forked:
    def __init__(self, spec: StageSpec, prepare: Callable[[], None] | None) -> None:
        self._process = CONTEXT.Process(target=_run, args=(process.spec_to_json(spec), prepare), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        STARTED.append(psutil.Process(self._process.pid))
        _STAGES.add(self._process.pid)

    def alive(self) -> bool:
        return self._process.is_alive()

    def stop(self, patience_s: float) -> None:
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def launch_fork(spec: StageSpec, prepare: Callable[[], None] | None = None) -> StageHandle:
    """Start a stage in a forked process. It sees the environment as it was when the first one was started.

    Args:
        prepare: a function of a module, which the process runs first.
    """
    return _Forked(spec, prepare)


def services_fork(patch: pytest.MonkeyPatch) -> None:
    """Let whole services that are built from now on start their stages so."""
    patch.setattr(stage_actors, "launch_child", launch_fork)


def forked_stages() -> list[psutil.Process]:
    """Those that run, in the order in which they were started: the first stage first."""
    return [each for each in running_forks() if each.pid in _STAGES]
