"""How signals end the process."""

from __future__ import annotations

import signal
import threading


def stop_on_signals() -> None:
    """Make SIGTERM, which containers and supervisors send, raise KeyboardInterrupt like Ctrl-C.

    Ctrl-C is restored, too: a shell that starts a background job makes it ignore SIGINT.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
