"""The event loop's clock, as exact as the engine needs it."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Seconds of the running event loop's clock, which timers go by.

    uvloop's own clock counts whole milliseconds and stands still while callbacks run; a pass takes a few milliseconds.
    """
    loop = asyncio.get_running_loop()
    return loop.time() if isinstance(loop, asyncio.BaseEventLoop) else time.monotonic()
