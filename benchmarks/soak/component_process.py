"""The handle of a component's process: starts, kills, stops and replaces it, and asks for its numbers."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Protocol

import psutil

from benchmarks.soak.component import ComponentSpec

_ANSWER_S = 20.0
# Seconds without a descriptor less after which none is thought to follow.
_SETTLED = 3


class RunningProcess(Protocol):
    """What is asked of a component's process, as ``subprocess.Popen[str]`` has it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[str] | None: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, number: int, /) -> None: ...


# Starts one: what it is told, as its one argument, and a file for what it says; None: the terminal.
Start = Callable[[str, Path | None], RunningProcess]


def started_anew(told: str, log: Path | None, module: str = "benchmarks.soak.component") -> RunningProcess:
    """Start a component as ``python -m``. In a session of its own Ctrl-C does not reach it; it ends when its input does."""
    with nullcontext() if log is None else log.open("a") as lines:
        return subprocess.Popen(
            [sys.executable, "-m", module, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=lines,
            text=True,
            start_new_session=True,
        )


class ComponentProcess:
    """A process that serves a component.

    Args:
        start: starts it.
        log: a file for what it says; None: the terminal.

    Attributes:
        lives: how many times it was started.
    """

    def __init__(self, spec: ComponentSpec, start: Start = started_anew, log: Path | None = None) -> None:
        self._log = log
        self.role, self.port = spec.role, spec.port
        self.lives = 0
        self._start, self._told = start, spec.written()
        self._process: RunningProcess | None = None
        self._asking = asyncio.Lock()
        self._killing = False

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> RunningProcess:
        assert self._process is not None, f"{self.role} was never started"
        return self._process

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself: not because it was killed here."""
        return not self._killing and self._running.poll() is not None

    def launch(self) -> None:
        """Start it; ``ready`` waits until it serves."""
        self.lives += 1
        self._killing = False
        self._process = self._start(self._told, self._log)

    async def ready(self) -> None:
        """Wait until it serves.

        Raises:
            RuntimeError: it has ended instead.
        """
        assert self._running.stdout is not None
        line = await asyncio.to_thread(self._running.stdout.readline)
        if line.strip() != "serving":
            raise RuntimeError(f"the {self.role} has not started: {line.strip() or 'it has ended'}")

    def kill(self) -> None:
        process, self._killing = self._running, True
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    async def replace(self) -> None:
        """Kill it, and start another one in its place."""
        self.kill()
        self.launch()
        await self.ready()

    async def numbers(self) -> dict[str, float]:
        """Its metrics: the values of counters and gauges by name, with the values of labels in braces.

        Raises:
            TimeoutError: it does not answer.
        """
        async with self._asking, asyncio.timeout(_ANSWER_S):
            self.order("numbers")
            assert self._running.stdout is not None
            found: dict[str, float] = json.loads(await asyncio.to_thread(self._running.stdout.readline))
            return found

    async def settled_files(self, few: float = math.inf, within_s: float = 0.0) -> int:
        """Its open descriptors, once no fewer follow and they are ``few``; where they stay more, ``within_s`` later.

        gRPC closes a connection when its last call is collected, on either side, and what its threads wait on some time
        after they have nothing to do: on a busy machine that takes tens of seconds.
        """
        clock = asyncio.get_running_loop().time
        ends_at = clock() + within_s
        counts = [1 << 30]
        while len(counts) < _SETTLED or counts[-1] < counts[-_SETTLED] or (counts[-1] > few and clock() < ends_at):
            self.order("collect")
            await asyncio.sleep(1.0)
            counts.append(psutil.Process(self.pid).num_fds())
        return counts[-1]

    def order(self, words: str) -> None:
        """Have it do what ``component.ORDERS`` says of these words."""
        assert self._running.stdin is not None
        self._running.stdin.write(words + "\n")
        self._running.stdin.flush()

    def freeze(self) -> None:
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._running.send_signal(signal.SIGCONT)
