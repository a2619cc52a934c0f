"""How signals end the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

STOPPED_AT_ONCE = "Stopped at once, by a second signal; answers under way were cut off"


def stop_on_signals(at_once: str | None = None) -> None:
    """Make SIGTERM, which containers and supervisors send, raise KeyboardInterrupt like Ctrl-C.

    Ctrl-C is restored, too: a shell that starts a background job makes it ignore SIGINT.

    Args:
        at_once: what to say when a second signal ends the process while it stops; None: it raises KeyboardInterrupt again.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.stderr.write(f"{at_once}\n")
        sys.stderr.flush()
        os._exit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        if at_once is not None:
            _handle(end)
        raise KeyboardInterrupt

    _handle(stop)


def _handle(handler: signal._HANDLER) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
