"""Stages that die, readers that leave and deadlines that end in the midst of pauses, of new weights and of draining.

No token is lost or another one, each request has an end, and nothing stays taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from services.api.config import HttpConfig
from services.api.http.server import serve_http
from services.router.service import RouterService
from services.verifier.kernels.native.library import library
from speculation.errors import OutriderError
from speculation.ports import VerifierPort
from speculation.reloads import PauseMode, RunningAnswers
from tests.engine.stage_forks import forked_stages, services_fork
from tests.running.patience import PATIENCE_S, until
from tests.tiny_models.weight_versions import Answered, Between, Versions, answered, serving, wanted

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no native kernels here"),
    pytest.mark.xdist_group("stages"),
    pytest.mark.exhaustive,
]
LAYOUTS = pytest.mark.parametrize("flags", [("verifier.stages=2",), ("verifier.tensor_parallel_size=2",)], ids=str)
STEPS = ("read", "pause", "replace", "keep")
# Of which the even ones are sent as a whole.
NUMBERS = range(4)


@dataclass
class Service:
    router: RouterService
    verifier: Any

    def ask(self, number: int, told: Answered | None = None) -> asyncio.Task[Answered]:
        return asyncio.create_task(answered(self.router, wanted(number, whole=number % 2 == 0), told))

    async def begun(self) -> list[asyncio.Task[Answered]]:
        """Answers of all kinds that are under way."""
        told = [Answered() for _ in NUMBERS]
        asked = [self.ask(number, each) for number, each in zip(NUMBERS, told, strict=True)]
        await until(lambda: all(each.tokens for each in told))
        return asked


@asynccontextmanager
async def spread(
    versions: Versions,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[str], Awaitable[None]] | None = None,
    after: Callable[[str], Awaitable[None]] | None = None,
) -> AsyncIterator[Service]:
    """A service over stages or ranks in processes, at whose end nothing is held, and which answers as the version it says."""
    services_fork(monkeypatch)
    seen: list[Any] = []

    def between(_: int, verifier: VerifierPort) -> Between:
        seen.append(verifier)
        return Between(verifier, before, after)

    async with serving(versions, "in process", between=between, flags=flags) as router:
        service = Service(router, seen[0])
        yield service
        loop = service.verifier.loop
        await until(lambda: loop.healthy and not (loop.running or loop.waiting))
        card = await service.verifier.describe()
        assert card.free_blocks == card.total_blocks and card.paused is None
        (served,) = [name for name, arithmetic in versions.names.items() if arithmetic == card.arithmetic]
        versions.check(1, await answered(router, wanted(1)), served)


def kill_a_stage() -> None:
    os.kill(forked_stages()[-1].pid, signal.SIGKILL)


@LAYOUTS
@pytest.mark.parametrize("running", ["finish", "restart"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_stage_that_dies_in_a_reload(
    versions: Versions, flags: tuple[str, ...], step: str, running: RunningAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[asyncio.Task[Answered]] = []

    async def before(reached: str) -> None:
        if reached == "pause":
            asked.extend(await service.begun())
        if reached == step:
            kill_a_stage()

    async with spread(versions, flags, monkeypatch, before) as service:
        # Whether it can be done all the same depends on the step; and either all answers are of what serves then, or named so.
        with suppress(OutriderError):
            await service.router.reload(str(versions.folder / "b"), running, 60.0)
        if not asked:
            asked = await service.begun()
        for number, task in zip(NUMBERS, asked, strict=True):
            versions.check(number, await task)


@LAYOUTS
@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_stage_that_dies_in_a_pause(
    versions: Versions, flags: tuple[str, ...], mode: PauseMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(versions, flags, monkeypatch) as service:
        asked = await service.begun()
        pausing = asyncio.create_task(service.router.pause(mode, 60.0))
        await asyncio.sleep(0.02)
        kill_a_stage()
        with suppress(OutriderError):
            await pausing
        late = service.ask(0)
        await asyncio.sleep(0.2)
        await service.router.resume()
        for number, task in zip((*NUMBERS, 0), (*asked, late), strict=True):
            versions.check(number, await task, "a")


@LAYOUTS
async def test_a_stage_that_dies_while_decoding_stands_still(
    versions: Versions, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is missed before anybody asks for anything."""
    async with spread(versions, flags, monkeypatch) as service:
        object.__setattr__(service.verifier.loop.config, "idle_beat_s", 0.05)
        asked = await service.begun()
        await service.router.pause("keep", 60.0)
        built: int = id(service.verifier._target._earlier)
        kill_a_stage()
        await until(lambda: id(service.verifier._target._earlier) != built and service.verifier.loop.healthy)
        assert await service.router.paused() and not any(task.done() for task in asked)
        await service.router.resume()
        for number, task in zip(NUMBERS, asked, strict=True):
            versions.check(number, await task, "a")


@LAYOUTS
@pytest.mark.parametrize("how", ["they leave", "their deadline"])
@pytest.mark.parametrize("what", ["pause", "reload"])
async def test_readers_that_go_meanwhile(
    versions: Versions, flags: tuple[str, ...], what: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause that keeps answers, and in a reload once those that begin again wait."""
    gone: list[asyncio.Task[Answered]] = []

    async def go() -> None:
        if how == "they leave":
            for task in gone:
                task.cancel()
        await asyncio.wait([asyncio.create_task(asyncio.wait_for(task, 0.05)) for task in gone])

    async def after(reached: str) -> None:
        if reached == "pause":
            # All that was to end has ended.
            gone.extend(service.ask(number) for number in NUMBERS)
            await go()

    async def before(reached: str) -> None:
        if reached == "pause":
            gone.extend(await service.begun())

    hooks = (before, after) if what == "reload" else (None, None)
    async with spread(versions, flags, monkeypatch, *hooks) as service:
        if what == "reload":
            await service.router.reload(str(versions.folder / "b"), "restart", 60.0)
        else:
            gone.extend(await service.begun())
            await service.router.pause("keep", 60.0)
            gone.append(service.ask(0))
            await go()
            loop = service.verifier.loop
            await until(lambda: not (loop.running or loop.waiting))
            await service.router.resume()
        for number, task in enumerate(gone):
            if task.done() and not task.cancelled():
                versions.check(number % len(NUMBERS), await task)


@LAYOUTS
async def test_a_stage_that_dies_while_a_server_drains(
    versions: Versions, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with spread(versions, flags, monkeypatch) as service:
        server = await serve_http(service.router, HttpConfig(port=0))
        bodies = [
            {
                "prompt": f"the quick brown fox {number}",
                "max_tokens": 200,
                "ignore_eos": True,
                "seed": number,
                "stream": number % 2 == 1,
            }
            for number in NUMBERS
        ]
        async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            asked = [asyncio.create_task(_text(client, body)) for body in bodies]
            await until(lambda: service.verifier.loop.running == len(bodies))
            draining = asyncio.create_task(server.stop(60.0))
            await asyncio.sleep(0.02)
            kill_a_stage()
            texts = [await each for each in asked]
        await draining
        again = await serve_http(service.router, HttpConfig(port=0))
        async with httpx2.AsyncClient(base_url=again.url, timeout=PATIENCE_S) as client:
            assert texts == [await _text(client, {**body, "stream": False}) for body in bodies]
        await again.stop(0)


async def _text(client: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    """The text of an answer, whole or in pieces."""
    if not body["stream"]:
        return str((await client.post("/v1/completions", json=body)).json()["choices"][0]["text"])
    found = ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                found += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return found
