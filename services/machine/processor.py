"""What this process may use of the machine: cores, memory, the cache folder, features of the processor."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPU_QUOTA = _CGROUP / "cpu.max"


def cores() -> int:
    """Processor cores that this process may use, within the limit of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Without a limit the file is missing or says "max".
    with contextlib.suppress(OSError, ValueError):
        quota, period = _CPU_QUOTA.read_text().split()
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def cache_folder() -> Path:
    """Folder of this user for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


@functools.cache
def processor_flags() -> frozenset[str]:
    """Features of the processor by their Linux names; empty where /proc/cpuinfo does not list them."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return frozenset(next(line for line in lines if line.startswith("flags")).partition(":")[2].split())
    return frozenset()


def free_memory() -> float:
    """Bytes of memory that can still be allocated, within the limits of the container."""
    import psutil

    free = float(psutil.virtual_memory().available)
    # Without a limit the file is missing or says "max".
    with contextlib.suppress(OSError, ValueError):
        used = int((_CGROUP / "memory.current").read_text())
        # Cached file pages count as used, but are given up when memory is needed.
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        used -= sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        free = min(free, int((_CGROUP / "memory.max").read_text()) - used)
    return free


def processor() -> str:
    """The processor's name. platform.processor() is empty on many Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
