"""The machine that this process runs on."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPU_QUOTA = _CGROUP / "cpu.max"


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


def free_memory() -> float:
    """Bytes that processes may still take, within the limits that a container sets."""
    import psutil

    free = float(psutil.virtual_memory().available)
    # Where there is no such limit, the file is missing, or says "max".
    with contextlib.suppress(OSError, ValueError):
        used = int((_CGROUP / "memory.current").read_text())
        # Files that were read count as used, until somebody needs the room.
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        used -= sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        free = min(free, int((_CGROUP / "memory.max").read_text()) - used)
    return free


def processor() -> str:
    """The processor's name; platform.processor() knows none on many a Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
