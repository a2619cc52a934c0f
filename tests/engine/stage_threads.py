"""Pipeline stages in threads of the test's own process: started at once, and open to faults that a test plants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from services.verifier.config import TargetConfig
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.stages import process
from services.verifier.stages.upstream import StageHandle, StageSpec
from speculation.errors import TargetLost


class _InThread:
    def __init__(self, spec: StageSpec) -> None:
        # Through text, as to a process.
        told = process.spec_to_json(spec)
        self._thread = threading.Thread(target=self._serve, args=(told,), daemon=True)
        self._thread.start()

    @staticmethod
    def _serve(told: str) -> None:
        # A process says so in its log, and ends.
        with suppress(TargetLost):
            process.serve(process.spec_from_json(told))

    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, patience_s: float) -> None:
        self._thread.join(patience_s)


def launch_thread(spec: StageSpec) -> StageHandle:
    """Start a stage in a thread of its own. It cannot be killed."""
    return _InThread(spec)


@contextmanager
def targets_of_ranks(config_of: Callable[..., TargetConfig]) -> Iterator[Callable[..., TransformersTarget]]:
    """Makes targets of ranks and stages in threads, which gather by gloo; they end with the block.

    Args:
        config_of: gives the settings for so many stages, and by the names of other settings.
    """
    made: list[TransformersTarget] = []

    def of(ranks: int, stages: int = 1, **options: object) -> TransformersTarget:
        wanted = config_of(stages, tensor_parallel_size=ranks, pass_timeout_s=20.0, **options)
        made.append(TransformersTarget(wanted, launch_thread))
        return made[-1]

    yield of
    for target in made:
        target.shutdown()


def parts_noted(patch: pytest.MonkeyPatch) -> list[ModelSlice]:
    """Takes the parts of the stages and ranks that begin to serve in threads from now on, in any order."""
    found: list[ModelSlice] = []
    begin = process.Stage.__init__

    def noted(self: process.Stage, part: ModelSlice, *given: object) -> None:
        found.append(part)
        begin(self, part, *given)  # type: ignore[arg-type]

    patch.setattr(process.Stage, "__init__", noted)
    return found
