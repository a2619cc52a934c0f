"""Reads files of weights and adapters in a thread that ends with it, since torch's threads in it go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from speculation.errors import Unavailable

_Read = TypeVar("_Read")


def in_own_thread(read: Callable[[], _Read], what: str) -> asyncio.Future[_Read]:
    """What ``read`` gives, or raises.

    Raises:
        Unavailable: the machine has no thread for it.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=what)
    try:
        return asyncio.get_running_loop().run_in_executor(thread, read)
    except RuntimeError as error:
        raise Unavailable(f"no thread can be started to read the {what} ({error}); try again") from error
    finally:
        # What it has begun goes on to its end.
        thread.shutdown(wait=False)
