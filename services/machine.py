"""The machine that this process runs on."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Processor cores that this process may use, within the share that a container gives it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Where there is no such limit, the file is missing, or says "max".
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor says it can do, as Linux calls it; nothing where nobody says."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return frozenset(next(line for line in lines if line.startswith("flags")).partition(":")[2].split())
    return frozenset()


def processor() -> str:
    """The processor's name; platform.processor() knows none on many a Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
