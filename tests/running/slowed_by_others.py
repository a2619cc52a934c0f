"""How much slower a process was than on a machine that does nothing else, from what Linux's scheduler counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_PROC = Path("/proc")


@contextmanager
def slowed_by_others(process: psutil.Process) -> Iterator[Callable[[], float]]:
    """Gives a function that says, after the block, how many times as long the process's work took in it as it would have.

    Its threads, and those of its children, ran for some time, and waited for a processor for some. Of that wait as much is
    due to others as others had of the processors' time: threads that wait for each other do not count, nor does this process.
    It is 1 on a machine that does nothing else, and where nothing is counted.
    """
    before, ratio = _Counts(process), 1.0
    try:
        yield lambda: ratio
    finally:
        ratio = _Counts(process).ratio(before)


class _Counts:
    """What was counted until now.

    Attributes:
        threads: seconds that each thread has run, and has waited for a processor.
        busy_s: of all processors; ``own_s``: of these processes and of this one.
    """

    def __init__(self, process: psutil.Process) -> None:
        self.threads: dict[str, tuple[float, float]] = {}
        self.busy_s = self.own_s = 0.0
        own = process.children(recursive=True)
        for each in (process, psutil.Process(), *own):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                self.own_s += times.user + times.system
        for each in (process, *own):
            for file in (_PROC / str(each.pid) / "task").glob("*/schedstat"):
                # A thread may end meanwhile.
                with suppress(OSError):
                    ran, waited = file.read_text().split()[:2]
                    self.threads[file.parent.name] = int(ran) / 1e9, int(waited) / 1e9
        with suppress(OSError):
            user, nice, system, _, _, *more = (_PROC / "stat").read_text().splitlines()[0].split()[1:9]
            self.busy_s = sum(map(int, (user, nice, system, *more))) / os.sysconf("SC_CLK_TCK")

    def ratio(self, before: _Counts) -> float:
        """As ``slowed_by_others`` says, since ``before``."""
        both = self.threads.keys() & before.threads.keys()
        ran, waited = (sum(self.threads[each][n] - before.threads[each][n] for each in both) for n in (0, 1))
        busy_s, own_s = self.busy_s - before.busy_s, self.own_s - before.own_s
        if ran <= 0 or busy_s <= 0:
            return 1.0
        return 1 + min(1.0, max(0.0, 1 - own_s / busy_s)) * waited / ran
