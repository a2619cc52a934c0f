"""Outrider itself: all strategies on one engine, in one process or on a local Ray with gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, cast

import outrider
from benchmarks.bench.saved_run import RecordedAnswer, as_saved
from cluster import build
from cluster.models.target import ResolvedModel
from cluster.ray import on_ray
from cluster.settings.config import Settings
from cluster.settings.server import ServerSettings
from services.api.http.openai.origin_fields import pass_fields
from services.api.messages import ClientRequest, Completion, RequestedSampling, TextChunk, decoding_figures

Counts = dict[str, Any]


class _Engine(Protocol):
    """One topology."""

    async def stats(self) -> Counts:
        """``services.verifier.engine.stats.LoopStats`` as a JSON object."""
        ...

    def answer(self, strategy: str, request: Counts, load: Counts) -> AsyncIterator[tuple[tuple[int, ...], Counts | None]]:
        """Token ids as they arrive, and finally the request's counts."""
        ...

    async def record(self, strategy: str, request: Counts, load: Counts) -> RecordedAnswer:
        """The whole answer, with its passes."""
        ...


class Peer:
    """The whole pipeline; see ``worker.py`` for the interface.

    Raises:
        ConfigurationError: the settings or the model are unusable.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        settings = Settings(**spec["settings"])
        model = ResolvedModel(name=spec["model"], path=Path(spec["model_path"]))
        self._outer = ExitStack()
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        opening: AbstractAsyncContextManager[_Engine] = _in_process(settings, model)
        if spec.get("on") == "ray":
            # Only this process may reach the server. Serve's calls at start and end need a thread without an event loop.
            unseen = ServerSettings.model_validate({"port": 0, "http_port": None, "ops_port": None})
            private = settings.model_copy(update={"server": unseen})
            opening = _on_ray(self._outer.enter_context(on_ray.running_on_ray(private, model)).grpc)
        self._engine: _Engine = self._runner.run(self._stack.enter_async_context(opening))

    def versions(self) -> dict[str, str]:
        return {
            "outrider": version("outrider-server"),
            "torch": version("torch"),
            "transformers": version("transformers"),
        }

    def run(self, contestant: str, load: dict[str, Any]) -> dict[str, Any]:
        """Answer ``concurrency`` requests at a time; ``contestant`` is the strategy.

        With ``record``, an answer is told with its passes, as ``run``.
        """
        return self._runner.run(self._run(contestant, load))

    async def _run(self, strategy: str, load: dict[str, Any]) -> dict[str, Any]:
        gate = asyncio.Semaphore(load["concurrency"])

        async def one(request: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                return await self._answer(strategy, request, load)

        before = await self._engine.stats()
        start = time.perf_counter()
        tasks = [asyncio.ensure_future(one(request)) for request in load["requests"]]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            # If one request fails, the others must not run on into the next contestant's measurement.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        wall_s = time.perf_counter() - start
        return {"answers": answers, "wall_s": wall_s, "loop": difference(await self._engine.stats(), before)}

    async def _answer(self, strategy: str, request: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
        if load.get("record"):
            return {"run": as_saved(await self._engine.record(strategy, request, load), strategy)}
        start = time.perf_counter()
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []
        counts: Counts = {}
        async for new, final in self._engine.answer(strategy, request, load):
            if new:
                tokens += new
                arrivals.append((time.perf_counter() - start, len(new)))
            counts = final or counts
        return {"tokens": tokens, "arrivals": arrivals, **counts}

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()
        self._outer.close()


class _InProcess:
    def __init__(self, pipeline: build.Pipeline) -> None:
        self._pipeline = pipeline

    async def stats(self) -> Counts:
        return dataclasses.asdict(self._pipeline.verifier.loop.stats)

    async def answer(
        self, strategy: str, request: Counts, load: Counts
    ) -> AsyncIterator[tuple[tuple[int, ...], Counts | None]]:
        async for event in self._pipeline.router.generate(_message(strategy, request, load)):
            if isinstance(event, TextChunk):
                yield event.token_ids, None
            elif isinstance(event, Completion):
                yield (), {"histogram": event.stats.acceptance_histogram, "seconds_saved": event.stats.seconds_saved}

    async def record(self, strategy: str, request: Counts, load: Counts) -> RecordedAnswer:
        message = dataclasses.replace(_message(strategy, request, load), report="trees")
        events = [event async for event in self._pipeline.router.generate(message)]
        chunks = [event for event in events if isinstance(event, TextChunk)]
        (end,) = (event for event in events if isinstance(event, Completion))
        return RecordedAnswer(
            model=(await self._pipeline.router.models())[0].name,
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            origins=[origin for chunk in chunks for origin in chunk.origins],
            passes=[pass_fields(each) for chunk in chunks for each in chunk.passes],
            decoding=decoding_figures(end.strategy, end.stats),
            timing=end.timing,
            seed=end.seed,
            finish=end.finish_reason.value,
        )


def _message(strategy: str, request: Counts, load: Counts) -> ClientRequest:
    # The requested parameters only, not the model's defaults.
    sampling = RequestedSampling(
        temperature=load["temperature"],
        max_tokens=load["max_tokens"],
        seed=request["seed"],
        ignore_generation_config=True,
    )
    several = tuple(strategy.split("+"))
    return ClientRequest(
        input=tuple(request["prompt"]),
        sampling=sampling,
        strategy=strategy if len(several) == 1 else None,
        sources=several if len(several) > 1 else None,
        tenant=load["tenant"],
    )


@asynccontextmanager
async def _in_process(settings: Settings, model: ResolvedModel) -> AsyncIterator[_Engine]:
    async with build.in_process(settings, model) as pipeline:
        yield _InProcess(pipeline)


class _OnRay:
    def __init__(self, client: outrider.AsyncClient, verifier: Any) -> None:
        self._client = client
        self._verifier = verifier

    async def stats(self) -> Counts:
        counts: Counts = await self._verifier.loop_stats.remote()
        return counts

    async def answer(
        self, strategy: str, request: Counts, load: Counts
    ) -> AsyncIterator[tuple[tuple[int, ...], Counts | None]]:
        async with self._client.stream(token_ids=request["prompt"], **_options(strategy, request, load)) as stream:
            async for chunk in stream:
                yield chunk.token_ids, None
        assert stream.result is not None
        told = stream.result.speculative_decoding
        yield (), {"histogram": list(told.acceptance_histogram), "seconds_saved": told.seconds_saved}

    async def record(self, strategy: str, request: Counts, load: Counts) -> RecordedAnswer:
        options: outrider.requests.Options = {**_options(strategy, request, load), "report": "trees"}
        said = await self._client.generate(token_ids=request["prompt"], **options)
        return RecordedAnswer(
            model=said.model,
            text=said.text,
            token_ids=said.token_ids,
            origins=said.origins,
            passes=[dataclasses.asdict(each) for each in said.passes],
            decoding=dataclasses.asdict(said.speculative_decoding),
            timing=said.timing,
            seed=said.seed,
            finish=said.finish_reason,
        )


def _options(strategy: str, request: Counts, load: Counts) -> outrider.requests.Options:
    named: outrider.requests.Options = {"strategy": cast("outrider.Strategy", strategy)}
    if "+" in strategy:
        named = {"sources": strategy.split("+")}
    return {
        **named,
        "seed": request["seed"],
        "temperature": load["temperature"],
        "max_tokens": load["max_tokens"],
        "ignore_generation_config": True,
    }


@asynccontextmanager
async def _on_ray(address: str) -> AsyncIterator[_Engine]:
    from ray import serve

    async with outrider.AsyncClient(address) as client:
        yield _OnRay(client, serve.get_deployment_handle("verifier", "outrider"))


def difference(after: Any, before: Any) -> Any:
    """The increase of every count in nested dictionaries and lists; what was not there ``before`` was 0."""
    if isinstance(after, dict):
        return {key: difference(value, (before or {}).get(key)) for key, value in after.items()}
    if isinstance(after, list):
        return [difference(value, earlier) for value, earlier in zip_longest(after, before or [])]
    return after - (before or 0)
