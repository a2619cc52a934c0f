"""Pipeline stages in threads of the test's own process: started at once, and open to faults that a test plants."""

from __future__ import annotations

import threading

from services.verifier.stages import process
from services.verifier.stages.upstream import StageHandle, StageSpec


class _InThread:
    def __init__(self, spec: StageSpec) -> None:
        # Through text, as to a process.
        told = process.spec_to_json(spec)
        self._thread = threading.Thread(target=lambda: process.serve(process.spec_from_json(told)), daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, patience_s: float) -> None:
        self._thread.join(patience_s)


def launch_thread(spec: StageSpec) -> StageHandle:
    """Start a stage in a thread of its own. It cannot be killed."""
    return _InThread(spec)
