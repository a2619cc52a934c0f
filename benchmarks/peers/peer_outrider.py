"""Outrider itself: every strategy on one engine, in one process or on Ray behind gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster import build
from cluster.config import Settings
from cluster.models import ResolvedModel
from speculation.messages import ClientRequest, Completion, TextChunk
from speculation.types import SamplingParams


class Peer:
    """The pipeline, components joined in this process.

    Raises:
        ConfigurationError: settings or model do not work.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        settings = Settings(**spec["settings"])
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        model = ResolvedModel(name=spec["model"], path=Path(spec["model_path"]))
        self._pipeline = self._runner.run(self._stack.enter_async_context(build.in_process(settings, model)))

    def versions(self) -> dict[str, str]:
        """What runs."""
        import torch
        import transformers

        return {"outrider": version("outrider-server"), "torch": torch.__version__, "transformers": transformers.__version__}

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer ``concurrency`` requests at a time; ``contestant`` is the strategy."""
        return self._runner.run(self._run(contestant, load))

    async def _run(self, strategy: str, load: dict[str, Any]) -> dict[str, Any]:
        gate = asyncio.Semaphore(load["concurrency"])

        async def one(request: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                return await self._answer(strategy, request, load)

        stats = self._pipeline.verifier.loop.stats
        before = dataclasses.asdict(stats)
        start = time.perf_counter()
        answers = await asyncio.gather(*(one(request) for request in load["requests"]))
        wall_s = time.perf_counter() - start
        return {"answers": answers, "wall_s": wall_s, "loop": difference(dataclasses.asdict(stats), before)}

    async def _answer(self, strategy: str, request: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(temperature=load["temperature"], max_tokens=load["max_tokens"], seed=request["seed"])
        message = ClientRequest(
            input=tuple(request["prompt"]), sampling=sampling, seed_given=True, strategy=strategy, tenant=load["tenant"]
        )
        start = time.perf_counter()
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []
        async for event in self._pipeline.router.generate(message):
            if isinstance(event, TextChunk) and event.token_ids:
                tokens += event.token_ids
                arrivals.append((time.perf_counter() - start, len(event.token_ids)))
            elif isinstance(event, Completion):
                stats = event.stats
        return {
            "tokens": tokens,
            "arrivals": arrivals,
            "drafted": stats.num_draft_tokens,
            "histogram": stats.acceptance_histogram,
            "accepted_by_source": stats.accepted_by_source,
        }

    def close(self) -> None:
        """Stop the pipeline."""
        self._runner.run(self._stack.aclose())
        self._runner.close()


def difference(after: Any, before: Any) -> Any:
    """What a nested record of counts gained."""
    if isinstance(after, dict):
        return {
            key: difference(value, before.get(key, {} if isinstance(value, dict) else 0)) for key, value in after.items()
        }
    return after - before
