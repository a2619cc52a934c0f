"""How long work in one thread keeps all other threads of the process from running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def longest_gap(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that ``work`` takes, and the longest time in them in which another thread did not get Python's lock."""
    gaps: list[float] = []
    over = threading.Event()

    def run() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last += gaps[-1]

    other = threading.Thread(target=run)
    other.start()
    began = time.perf_counter()
    try:
        work()
    finally:
        took = time.perf_counter() - began
        over.set()
        other.join()
    return took, max(gaps)
