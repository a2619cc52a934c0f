"""How the process is ended from outside."""

from __future__ import annotations

import signal
import threading


def stop_on_signals() -> None:
    """From here on SIGTERM, which containers and supervisors send, raises KeyboardInterrupt like Ctrl-C does.

    And Ctrl-C does so even where a shell that starts this in its background would have it ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
