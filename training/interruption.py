"""Stops long work at a signal or when its time is over, so that it can save what it has."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


class Interruption:
    """A stop that was asked for, or will come with the time.

    Args:
        max_seconds: from now on; None: no limit.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._asked = asyncio.Event()

    def stop(self) -> None:
        """Stop what runs, and whatever would run later."""
        self._asked.set()

    def stop_on_signals(self) -> None:
        """Make SIGTERM and Ctrl-C call ``stop`` while the event loop runs, where signals can be handled."""
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, ValueError, RuntimeError):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)

    @property
    def seconds_left(self) -> float | None:
        """Until the time is over; None: there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def run(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run ``work``, or cancel it at the stop. Returns whether it finished; its errors are raised."""
        working, asked = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({working, asked}, timeout=self.seconds_left, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return True
            return False
        finally:
            for task in (working, asked):
                task.cancel()
            await asyncio.gather(working, asked, return_exceptions=True)


# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Make glibc keep freed tensors of up to 32 MiB for the next ones.

    Otherwise it gives them back to the system, and the next tensor's pages are cleared one fault at a time: that costs more
    than most of what is computed on them. Does nothing on other systems.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        mallopt(_TOP_PAD, 128 << 20)
