"""Ends what a process of tests leaves behind, however that ends itself: servers and the Rays that they have started.

Who is killed runs no fixture's end. Another process waits for that, and finds what is left by a mark in its environment, which
everything inherits that was started there. Where a system does not show environments, nothing is done.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "STARTED_BY_TESTS"
_PROCESSES = Path("/proc")


def end_with_this_process(patience_s: float = 15.0) -> None:
    """Have everything end with this process that it starts from now on, and does not end itself.

    Args:
        patience_s: servers end their Ray when they are asked to end; what goes on after so many seconds is killed.
    """
    if not (_PROCESSES / "self/environ").exists():
        return
    os.environ[MARK] = f"{os.getpid()}.{secrets.token_hex(8)}"
    nothing = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in range(3)]
    command = [sys.executable, "-I", __file__, str(os.getpid()), os.environ[MARK], str(patience_s)]
    # In a session of its own: what interrupts or kills this one's group is no business of it.
    os.posix_spawn(sys.executable, command, {}, file_actions=nothing, setsid=True)


def _wait_and_end(parent: int, mark: str, patience_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    for wish in (signal.SIGTERM, signal.SIGKILL):
        for process in left(mark):
            _tell(process, wish)
        until = time.monotonic() + patience_s
        while time.monotonic() < until and any(left(mark)):
            time.sleep(0.1)


def left(mark: str) -> Iterator[int]:
    """The processes that live and have that mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in _PROCESSES.iterdir():
        try:
            found = folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if found:
            yield int(folder.name)


def _tell(process: int, wish: signal.Signals) -> None:
    try:
        os.kill(process, wish)
    except OSError:
        return


if __name__ == "__main__":
    _wait_and_end(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
