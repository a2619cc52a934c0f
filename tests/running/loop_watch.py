"""How long the event loop of a test is kept from its next step: by its own work, or by what it waits for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_TICK_S = 0.001


class Watch:
    """Looks at the clock again and again.

    Attributes:
        longest_s: the longest time between two looks, but for what the loop's thread waited for a processor, as far as Linux
            counts that: other work of the machine is nobody's fault.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._counts = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    async def look(self) -> None:
        """For ever."""
        last, waited = time.perf_counter(), self._waited_s()
        while True:
            await asyncio.sleep(_TICK_S)
            last, before = time.perf_counter(), last
            waited, without = self._waited_s(), waited
            self.longest_s = max(self.longest_s, last - before - _TICK_S - (waited - without))

    def _waited_s(self) -> float:
        """Seconds for which this thread was ready and had no processor."""
        try:
            return int(self._counts.read_text().split()[1]) / 1e9
        except OSError:
            return 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[Watch]:
    """Watch the running loop during a block."""
    watch = Watch()
    looking = asyncio.create_task(watch.look())
    # The first look is not the block's.
    await asyncio.sleep(0)
    try:
        yield watch
    finally:
        # What has held the loop up to the end is seen by one more look.
        await asyncio.sleep(2 * _TICK_S)
        looking.cancel()
