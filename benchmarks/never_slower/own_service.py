"""The handle of one contestant's own service: a process that decodes while it is the contestant's turn, and else waits."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import Any, Protocol, Self

import outrider
from benchmarks.never_slower.held_service import GOING, HELD, written
from benchmarks.never_slower.load import client_of
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings
from speculation.errors import ConfigurationError

_STOP_S = 20.0


class TurnClock:
    """Seconds that have passed while it ran."""

    def __init__(self) -> None:
        self._past_s = 0.0
        self._started: float | None = time.perf_counter()

    def __call__(self) -> float:
        return self._past_s + (0.0 if self._started is None else time.perf_counter() - self._started)

    def stop(self) -> None:
        self._past_s, self._started = self(), None

    def start(self) -> None:
        self._past_s, self._started = self(), time.perf_counter()


class HeldService(Protocol):
    """A service that stops between two passes, and goes on.

    Attributes:
        clock: runs while the service does.
    """

    client: outrider.AsyncClient
    clock: TurnClock

    async def hold(self) -> None:
        """Return once it stands still."""

    async def go(self) -> None:
        """Let it decode."""


class OwnService:
    """A service in a process of its own, with its own memory and its own idea of what things cost."""

    def __init__(self, process: Process, address: str) -> None:
        self.clock = TurnClock()
        self.client = client_of(address)
        self._process = process

    @classmethod
    async def start(cls, settings: Settings, model: ResolvedModel) -> Self:
        """Start it, and wait until it serves.

        Raises:
            ConfigurationError: it does not; says why.
        """
        # In a session of its own Ctrl-C does not reach it; it ends when its input does.
        command = (sys.executable, "-m", "benchmarks.never_slower.held_service")
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        said = await _ask(process, written(settings, model))
        if not isinstance(said, dict) or "address" not in said:
            process.kill()
            await process.wait()
            raise ConfigurationError(said["error"] if said else "a contestant's service has not started; its log says why")
        return cls(process, said["address"])

    async def hold(self) -> None:
        await self._order("hold", HELD)
        self.clock.stop()

    async def go(self) -> None:
        self.clock.start()
        await self._order("go", GOING)

    async def close(self) -> None:
        await self.client.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _order(self, order: str, answer: str) -> None:
        if await _ask(self._process, order) != answer:
            raise ConfigurationError("a contestant's service has ended; its log says why")


async def _ask(process: Process, line: str) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    return json.loads(await process.stdout.readline() or "null")
