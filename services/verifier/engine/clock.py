"""The event loop's clock, as exact as the engine needs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def now() -> float:
    """Seconds of the running event loop's clock, which timers go by.

    uvloop's own clock counts whole milliseconds and stands still while callbacks run; a pass takes a few milliseconds.
    """
    return clock()()


def clock() -> Callable[[], float]:
    """What ``now`` asks, for those who ask often in one event loop: to find the running one takes a call of the system."""
    loop = asyncio.get_running_loop()
    own = isinstance(loop, asyncio.BaseEventLoop) and type(loop).time is not asyncio.BaseEventLoop.time
    # asyncio's own clock is the system's.
    return loop.time if own else time.monotonic
