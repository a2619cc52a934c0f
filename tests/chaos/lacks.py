"""What a component's process may lack: disk, descriptors, memory, threads. Each is taken from it while it runs, and given back."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Callable, Sequence

import psutil

from benchmarks.soak import component
from benchmarks.soak.component_process import ComponentProcess
from cluster.process.observing import Observing

_Change = Callable[[ComponentProcess], None]


def _limited(kind: int, least: Callable[[psutil.Process], int]) -> tuple[_Change, _Change]:
    """Gives a process no more of something than ``least``, and again as much as it may have."""

    def take(process: ComponentProcess) -> None:
        _, most = resource.prlimit(process.pid, kind)
        resource.prlimit(process.pid, kind, (least(psutil.Process(process.pid)), most))

    def give(process: ComponentProcess) -> None:
        _, most = resource.prlimit(process.pid, kind)
        resource.prlimit(process.pid, kind, (most, most))

    return take, give


# What takes something from a process, and what gives it back.
TAKES: dict[str, tuple[_Change, _Change]] = {
    "frozen": (ComponentProcess.freeze, ComponentProcess.thaw),
    # No file can grow, as on a full disk.
    "no disk": _limited(resource.RLIMIT_FSIZE, lambda _: 0),
    # Nothing more can be opened.
    "no descriptors": _limited(resource.RLIMIT_NOFILE, lambda process: process.num_fds()),
    # There is no more address space.
    "no memory": _limited(resource.RLIMIT_AS, lambda process: process.memory_info().vms),
    "no threads": (lambda process: process.order("no threads"), lambda process: process.order("threads")),
}

_start_thread = threading.Thread.start


def _take_threads(_: Observing) -> None:
    """From now on starting a thread fails as it does where the machine has none left."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start  # type: ignore[method-assign]


def _give_threads(_: Observing) -> None:
    threading.Thread.start = _start_thread  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    """As ``benchmarks.soak.component``, for a process from which threads may be taken."""
    orders = {**component.ORDERS, "no threads": _take_threads, "threads": _give_threads}
    asyncio.run(component.serve(component.ComponentSpec.read(arguments[0]), orders))
