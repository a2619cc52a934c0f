"""Disconnects this process from Ray for good. Any later call of Ray's API would connect it anew."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import defaultdict
from typing import Any

# What still runs in Serve's thread is over long before; a thread that hangs does not keep us.
_PATIENCE_S = 5.0


def disconnect() -> None:
    """Leave Ray; a Ray that this process has started ends."""
    import ray

    end_listening()
    ray.shutdown()


def end_listening() -> None:
    """Have the handles of Ray Serve listen to its controller no longer, nor report to it.

    They do both in a thread of Serve's. ``ray.shutdown`` leaves that running, and its next question to the controller makes
    Ray connect again by itself, with its own log lines and a traceback on stderr.
    """
    from ray.serve import context
    from ray.serve._private.long_poll import LongPollClient

    by_loop = defaultdict[asyncio.AbstractEventLoop, list[Any]](list)
    # All handles share a listener that Serve offers no way to.
    for each in gc.get_objects():
        if type(each) is LongPollClient and each.event_loop.is_running():
            by_loop[each.event_loop].append(each)
    for loop, listeners in by_loop.items():
        # In the loop itself, so that none is about to ask.
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_stop(listeners), loop).result(_PATIENCE_S)
    if (client := context._global_client) is not None:
        client.shutdown_cached_handles()


async def _stop(listeners: list[Any]) -> None:
    for each in listeners:
        each.stop()
