"""What runs: for tests that start processes."""

from __future__ import annotations

import psutil


def is_worker(process: psutil.Process) -> bool:
    """Whether it is a bench's worker that lives; one that has ended and was not waited for has no command any more."""
    try:
        return "worker.py" in " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return False
