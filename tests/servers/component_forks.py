"""Components of a service in processes of their own that are forked (``tests.running.forks``): what they do, and what one can do to them, is as
in those that the product starts (``benchmarks.soak.component_process.started_anew``).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.soak import component
from benchmarks.soak.component_process import RunningProcess
from tests.running.forks import CONTEXT, STARTED

Main = Callable[[list[str]], None]


def _run(main: Main, told: str, orders: Connection, answers: Connection, log: Path | None) -> None:
    os.setsid()
    os.dup2(orders.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    orders.close()
    answers.close()
    if log is not None:
        with log.open("a") as lines:
            os.dup2(lines.fileno(), 2)
    # Python's own has no end, and no descriptor: multiprocessing has replaced it.
    sys.stdin = os.fdopen(0, closefd=False)
    main([told])


class _Forked:
    """Implements ``RunningProcess``."""

    def __init__(self, main: Main, told: str, log: Path | None) -> None:
        (orders, writing), (reading, answers) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        with orders, answers, writing, reading:
            self._process = CONTEXT.Process(target=_run, args=(main, told, orders, answers, log), daemon=True)
            self._process.start()
            self.stdin, self.stdout = os.fdopen(os.dup(writing.fileno()), "w"), os.fdopen(os.dup(reading.fileno()))
        assert self._process.pid is not None
        self.pid = self._process.pid
        STARTED.append(psutil.Process(self.pid))

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(told: str, log: Path | None, main: Main = component.main) -> RunningProcess:
    """Start a component in a forked process. It sees the environment as it was when the first one was started.

    Args:
        main: what runs it; a function of a module.
    """
    return _Forked(main, told, log)
