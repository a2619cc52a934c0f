"""A target of two stages that Ray has placed: the same tokens, and a stage that is killed comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider import Client
from tests.on_ray import Service

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray")]

ASKED: dict[str, Any] = {
    "token_ids": [40, 41, 42] * 12,
    "max_tokens": 200,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 9,
}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> tuple[int, ...]:
    import asyncio

    from services.api.messages import ClientRequest, RequestedSampling, TextChunk
    from tests.service import pipeline

    async def plain() -> tuple[int, ...]:
        params = RequestedSampling(max_tokens=200, ignore_eos=True, temperature=1.0, seed=9)
        request = ClientRequest(input=tuple(ASKED["token_ids"]), sampling=params, strategy="autoregressive", tenant="")
        async with pipeline(tiny_model) as running:
            events = running.router.generate(request)
            return tuple([token async for event in events if isinstance(event, TextChunk) for token in event.token_ids])

    return asyncio.run(plain())


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    flags = [
        "server.port=0", "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096", "verifier.threads=1",
        "verifier.stages=2", "verifier.tensor_parallel_size=2", "verifier.num_cpus=0.25",
    ]  # fmt: skip
    running = Service(tiny_model, flags)
    yield running
    running.stop()


def stages() -> list[psutil.Process]:
    """Ray names an actor's process after it."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::Stage" in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_the_same_tokens(service: Service, expected: tuple[int, ...]) -> None:
    # Two ranks of each stage, one of which is the verifier itself.
    assert len(stages()) == 3
    with Client(service.address) as client:
        for strategy in ("autoregressive", "prompt_lookup"):
            assert client.generate(strategy=strategy, **ASKED).token_ids == expected


def test_a_stage_that_is_killed_comes_back(service: Service, expected: tuple[int, ...]) -> None:
    victim = stages()[0].pid
    tokens: list[int] = []
    with Client(service.address) as client, client.stream(strategy="prompt_lookup", **ASKED) as stream:
        for chunk in stream:
            if not tokens:
                os.kill(victim, signal.SIGKILL)
            tokens += chunk.token_ids
    assert tuple(tokens) == expected
    assert victim not in [process.pid for process in stages()]
