"""Mixed load for a long time: cancels, disconnects, bad input, a cache that is too small, drafters that die. Nothing leaks.

A quarter of a minute in CI; an hour with OUTRIDER_SOAK_MINUTES=60 pytest -m slow -s tests/chaos/test_soak.py
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import outrider
from cluster import build
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from services.api.config import PublicServerConfig
from services.api.grpc.server import serve_public
from services.links.grpc_draft import GrpcDraftLink
from services.links.in_process import InProcessVerifierLink
from services.router.service import RouterService
from services.verifier.service import VerifierService
from tests.drafter_process import DrafterProcess
from tests.fakes import origin
from tests.patience import until
from tests.service import tiny_settings

MINUTES = float(os.environ.get("OUTRIDER_SOAK_MINUTES", "0.25"))
USERS = 6
TOKEN = "a shared secret of ours"

_DRAFTER = f"""
import asyncio
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.grpc_draft import serve_drafter

async def main():
    server, port = await serve_drafter(DrafterService(DrafterConfig()), "127.0.0.1:0", {TOKEN!r})
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""

ENDS = {"answered", "refused", "closed", "cancelled", "disconnected"}


@asynccontextmanager
async def service(folder: Path, drafter: DrafterProcess) -> AsyncIterator[tuple[str, VerifierService]]:
    """The whole service, its drafter behind gRPC, with room for about two whole requests."""
    flags = tiny_settings("verifier.kv_cache_tokens=512", "verifier.max_nodes=16", "verifier.max_waiting=4")
    settings = load(flags=flags, environ={})
    model = ResolvedModel(name="tiny", path=folder)
    link = GrpcDraftLink(drafter.address, TOKEN)
    verifier = VerifierService(build.verifier_config(settings, model), [origin(link)])
    router = RouterService(build.router_config(settings, model), InProcessVerifierLink(verifier))
    await verifier.start()
    server = await serve_public(router, PublicServerConfig(port=0))
    try:
        yield server.address, verifier
    finally:
        await server.stop(0)
        await verifier.stop()


class User:
    """Asks one thing after the other, and does not always wait for the answer."""

    def __init__(self, address: str, seed: int, ends: Counter[str], answers: dict[Any, tuple[int, ...]]) -> None:
        self._address = address
        self._random = random.Random(seed)
        self._ends = ends
        self._answers = answers

    async def live(self, until: float) -> None:
        while time.monotonic() < until:
            async with outrider.AsyncClient(self._address) as client:
                for _ in range(self._random.randint(1, 8)):
                    if time.monotonic() < until:
                        self._ends[await self._ask(client)] += 1

    async def _ask(self, client: outrider.AsyncClient) -> str:
        """One request, and how it ended."""
        mood = self._random.random()
        if mood < 0.05:
            with pytest.raises(outrider.InvalidArgument):
                await client.generate(token_ids=[5], temperature=-1.0)
            return "refused"
        about = (self._random.randrange(6), self._random.choice([8, 60, 250]), self._random.choice([0.0, 1.0]))
        number, length, temperature = about
        strategy = self._random.choice(["autoregressive", "prompt_lookup"])
        prompt = ([40 + number, 41, 42] * length)[:length]
        options: dict[str, Any] = {
            "strategy": strategy, "max_tokens": 60, "temperature": temperature, "seed": 7, "ignore_eos": True,
        }  # fmt: skip
        try:
            if mood < 0.35:
                return await self._leave(client, prompt, options)
            result = await client.generate(token_ids=prompt, **options)
        except outrider.ResourceExhausted:
            await asyncio.sleep(0.05)
            return "queue full"
        assert len(result.token_ids) == 60
        assert self._answers.setdefault(about, result.token_ids) == result.token_ids, (about, strategy)
        return "answered"

    async def _leave(self, client: outrider.AsyncClient, prompt: list[int], options: dict[str, Any]) -> str:
        """Leave in mid-answer: by closing the stream, by cancelling the task, or with the whole connection."""
        way = self._random.choice(["closed", "cancelled", "disconnected"])
        patience = self._random.randint(0, 10)

        async def read(client: outrider.AsyncClient) -> None:
            async with client.stream(token_ids=prompt, **options) as stream:
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen > patience and way != "cancelled":
                        return

        if way == "disconnected":
            async with outrider.AsyncClient(self._address) as other:
                await read(other)
            return way
        task = asyncio.create_task(read(client))
        if way == "cancelled":
            await asyncio.sleep(self._random.random() * 0.1)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return way


async def usage() -> tuple[int, float]:
    """Open files and sockets, and resident memory in MiB, of a service without requests.

    gRPC closes connections a moment after the last of their calls is collected.
    """
    process, counts = psutil.Process(), [1 << 30]
    while len(counts) < 4 or counts[-1] < counts[-4]:
        gc.collect()
        await asyncio.sleep(1.0)
        counts.append(process.num_fds())
    return counts[-1], process.memory_info().rss / 2**20


@pytest.mark.exhaustive
@pytest.mark.timeout(MINUTES * 60 + 180)
async def test_a_long_time(tiny_model: Path) -> None:
    drafter, ends, answers, restarts = DrafterProcess(_DRAFTER), Counter[str](), dict[Any, tuple[int, ...]](), 0
    await drafter.start()
    try:
        async with service(tiny_model, drafter) as (address, verifier):

            async def soak(seconds: float, seed: int) -> None:
                nonlocal restarts
                until = time.monotonic() + seconds
                users = [asyncio.create_task(User(address, seed + n, ends, answers).live(until)) for n in range(USERS)]
                while time.monotonic() < until:
                    await asyncio.sleep(min(seconds / 4, 20))
                    # Another one, at another port, that knows nothing.
                    drafter.end()
                    await drafter.start()
                    restarts += 1
                await asyncio.gather(*users)

            await soak(5, seed=0)
            files, memory = await usage()
            await soak(60 * MINUTES, seed=1000)
            stats, seed = verifier.loop.stats, 2000
            # A slow machine needs longer until all of it has happened.
            while not (stats.preemptions and stats.drafts_used and set(ends) >= ENDS):
                await soak(5, seed := seed + 1000)
            await until(lambda: not (verifier.loop.running or verifier.loop.waiting))
            files_after, memory_after = await usage()
            card = await verifier.describe()
            print(
                f"\n{MINUTES:g} minutes: {dict(ends)}, {restarts} drafters replaced, {stats.preemptions} times a "
                f"request stepped back, {stats.prompt_tokens_cached} tokens shared; files {files} -> {files_after}, "
                f"memory {memory:.0f} -> {memory_after:.0f} MiB"
            )
            assert card.free_blocks == card.total_blocks
            assert verifier.healthy
            # A connection or two may not have been closed by the other side yet.
            assert files_after <= files + 10
            assert memory_after <= memory + 60
    finally:
        drafter.end()
