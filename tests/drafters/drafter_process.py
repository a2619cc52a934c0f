"""A drafter in a process of its own, which tests can freeze, kill and replace."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection

from tests.running.forks import CONTEXT


def _run(script: str, output: Connection) -> None:
    os.dup2(output.fileno(), 1)
    exec(script, {})


class DrafterProcess:
    """Runs ``script``, which prints the port that it serves on."""

    def __init__(self, script: str) -> None:
        self.port = 0
        self._script = script
        self._process: multiprocessing.process.BaseProcess | None = None

    async def start(self) -> None:
        self.port = await asyncio.to_thread(self._start)

    def _start(self) -> int:
        reading, writing = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_run, args=(self._script, writing), daemon=True)
        self._process.start()
        writing.close()
        with open(os.dup(reading.fileno())) as lines, reading:
            return int(lines.readline())

    def signal(self, number: int) -> None:
        assert self._process is not None and self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()

    async def address(self) -> str:
        return f"127.0.0.1:{self.port}"
