"""What a replica measures of its own load, for autoscaling."""

from __future__ import annotations

import asyncio
import time

_PERIOD_S = 0.5


class BusyCores:
    """How many cores this process uses."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time()

    def since_last(self) -> float:
        """Cores used since the last call, on average."""
        now = time.monotonic(), time.process_time()
        passed_s, used_s = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return used_s / passed_s if passed_s > 0 else 0.0


class LoopLag:
    """How late the running event loop gets to what is due."""

    def __init__(self) -> None:
        self._sum_s, self._count = 0.0, 0
        self._task = asyncio.create_task(self._measure(), name="loop-lag")

    def since_last(self) -> float:
        """Mean delay since the last call, in seconds."""
        mean_s = self._sum_s / self._count if self._count else 0.0
        self._sum_s, self._count = 0.0, 0
        return mean_s

    async def _measure(self) -> None:
        while True:
            due = time.monotonic() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._sum_s += max(0.0, time.monotonic() - due)
            self._count += 1
