"""A drafter in a process of its own, which tests can freeze, kill and replace."""

from __future__ import annotations

import asyncio
import subprocess
import sys


class DrafterProcess:
    """Runs ``script``, which prints the port that it serves on."""

    def __init__(self, script: str) -> None:
        self.port = 0
        self._script = script
        self._process: subprocess.Popen[str] | None = None

    async def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", self._script], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(await asyncio.to_thread(self._process.stdout.readline))

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    async def address(self) -> str:
        return f"127.0.0.1:{self.port}"
