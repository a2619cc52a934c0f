"""Notices when Ray has died, and ends this process then: a service whose replicas are gone must not look alive.

Ray itself tells nobody: replicas vanish or hang, while the process that started them waits. Once this process has ended, its
supervisor can start it again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from cluster.process.terminal import tell

log = logging.getLogger(__name__)

# Ray's own processes on this machine, by what they are called in messages. Its agents end the raylet with them.
_PROCESSES = {"gcs_server": "control store (GCS)", "raylet": "node manager (raylet)"}
_PERIOD_S = 1.0
# A local Ray that hangs for so long, or one elsewhere that does not answer for so long, counts as dead.
_PATIENCE_S, _PATIENCE_ELSEWHERE_S = 10.0, 60.0
# How often to note which processes belong to Ray, so that none is left behind.
_NOTE_EVERY = 5
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class Vitals:
    """Judges from what is seen of Ray whether it lives.

    Args:
        patience_s: seconds that it may hang.
        clock: seconds.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._well_at: dict[str, float] = {}

    def death(self, processes: Mapping[str, str | None], answers: bool) -> str | None:
        """Why Ray counts as dead, in words; None while it lives.

        Args:
            processes: psutil's status of each of Ray's processes, by its name; None: there is none any more.
            answers: whether its control store answers.
        """
        for name, status in processes.items():
            if status is None or status in _ENDED:
                return f"its {name} has died"
            if self._hangs(name, status not in _STOPPED):
                return f"its {name} has been stopped for {self._patience_s:g} s"
        if self._hangs("", answers):
            return f"it has not answered for {self._patience_s:g} s"
        return None

    def _hangs(self, name: str, well: bool) -> bool:
        now = self._clock()
        if well:
            self._well_at[name] = now
        return now - self._well_at.setdefault(name, now) >= self._patience_s


@contextmanager
def watching_ray(answers: Callable[[], bool], *, local: bool) -> Iterator[None]:
    """End this process with one line and code 1 if Ray dies during the block.

    Args:
        answers: whether its control store answers, asked in a thread.
        local: whether Ray was started by this process.
    """
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(answers, local, done), name="ray-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()


def _watch(answers: Callable[[], bool], local: bool, done: threading.Event) -> None:
    vitals = Vitals(_PATIENCE_S if local else _PATIENCE_ELSEWHERE_S)
    own = _own_processes() if local else {}
    below: Sequence[psutil.Process] = ()
    rounds = 0
    while not done.wait(_PERIOD_S):
        if local and rounds % _NOTE_EVERY == 0:
            below = _below() or below
        rounds += 1
        # The question takes seconds where nobody answers; a process that has died is seen at once.
        states = {name: _status(process) for name, process in own.items()}
        why = vitals.death(states, None in states.values() or answers())
        if why is not None and not done.is_set():
            _end(why, local, below)


def _own_processes() -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if (name := _PROCESSES.get(process.name())) is not None:
                found[name] = process
    return found


def _status(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.Error:
        return None


def _below() -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []


def _end(why: str, local: bool, below: Sequence[psutil.Process]) -> None:
    rest = "the service has ended with it; start it again" if local else "its replicas may go on"
    tell(f"Ray is gone: {why}; {rest}")
    # The children of a dead raylet are nobody's any more, so they were noted before.
    for process in (*below, *(_below() if local else ())):
        with suppress(psutil.Error):
            process.kill()
    os._exit(1)
