"""Keeps a number of requests in flight for a time, and records every token's arrival."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import outrider
from benchmarks.never_slower.requests import LoadRequest
from outrider.requests import Options

Supply = Callable[[float], LoadRequest]
Clock = Callable[[], float]
TENTH_S = 0.1


@dataclass(kw_only=True, slots=True)
class LoadAnswer:
    """An answer as far as it came.

    Attributes:
        finished: it has no more tokens than these.
        sent_s: when the request was sent, by the load's clock.
        arrivals: (seconds since then, tokens so far), one pair for each chunk.
    """

    request: LoadRequest
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    sent_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRecord:
    """What came of a load.

    Attributes:
        began_s: when it began to be measured, by the load's clock; ``seconds``: how long it was.
        tenths: tokens that arrived in every tenth of a second of them.
        answers: of all requests that were begun, in their order, also of those begun before it was measured.
    """

    at_once: int
    began_s: float
    seconds: float
    tenths: tuple[int, ...]
    answers: tuple[LoadAnswer, ...]

    @property
    def ttft_s(self) -> float:
        """Median seconds from a request to its first token; 0: none came."""
        return statistics.median([answer.arrivals[0][0] for answer in self.answers if answer.arrivals] or [0.0])


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadShape:
    """How a load runs.

    Attributes:
        seconds: how long it is measured, from when its first ``at_once`` requests have begun to be answered.
        lead_s: longest time until then.
    """

    at_once: int
    strategy: str
    temperature: float
    seconds: float
    lead_s: float


def client_of(address: str) -> outrider.AsyncClient:
    """A client whose requests are told if they fail, not asked again. It belongs to the event loop in which it is made."""
    return outrider.AsyncClient(address, retry=outrider.Retry(attempts=1))


async def keep_in_flight(client: outrider.AsyncClient, supply: Supply, shape: LoadShape) -> LoadRecord:
    """Ask what ``supply`` gives, ``at_once`` at a time; what is under way at the end is cancelled.

    Raises:
        OutriderError: a request failed.
    """
    running = RunningLoad(client, supply, shape)
    try:
        await running.begin()
        await running.go_on(shape.seconds)
        return running.record()
    finally:
        await running.stop()


async def answer_all(
    client: outrider.AsyncClient, requests: Sequence[LoadRequest], at_once: int, strategy: str, temperature: float
) -> list[LoadAnswer]:
    """Ask every request once, ``at_once`` at a time, and wait for all answers.

    Raises:
        OutriderError: a request failed.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(request: LoadRequest) -> LoadAnswer:
        answer = LoadAnswer(request=request)
        async with gate:
            await _ask(client, answer, strategy, temperature, lambda count: None)
        return answer

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


class RunningLoad:
    """A load that may be looked at, and stopped, at any time.

    Args:
        clock: gives the seconds by which everything is timed.
    """

    def __init__(
        self, client: outrider.AsyncClient, supply: Supply, shape: LoadShape, clock: Clock = time.perf_counter
    ) -> None:
        self._client, self._supply, self._shape, self._clock = client, supply, shape, clock
        self._answers: list[LoadAnswer] = []
        self._tenths = [0] * round(shape.seconds / TENTH_S)
        self._began_s: float | None = None
        self._waiting = shape.at_once
        self._all_begun = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Send the first requests; from when all have begun to be answered, or ``lead_s`` later, the load is measured.

        Raises:
            OutriderError: a request failed.
        """
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._shape.at_once)]
        await _unless_one_fails(self._workers, self._all_begun.wait(), self._shape.lead_s)
        self._began_s = self._clock()

    async def go_on(self, seconds: float) -> None:
        """Wait so long; raises as ``begin`` does."""
        await _unless_one_fails(self._workers, asyncio.sleep(seconds), None)

    async def stop(self) -> None:
        """Cancel what is under way."""
        await _cancel(self._workers)

    async def _work(self) -> None:
        """One of the requests in flight, and then the next, until it is cancelled."""
        first = True
        while True:
            answer = LoadAnswer(request=self._supply(self._elapsed_s()))
            self._answers.append(answer)

            def arrived(count: int, of_first: bool = first, answer: LoadAnswer = answer) -> None:
                self._arrived(count)
                if of_first and len(answer.tokens) == count:
                    self._one_begun()

            await _ask(self._client, answer, self._shape.strategy, self._shape.temperature, arrived, self._clock)
            first = False

    def record(self) -> LoadRecord:
        """What has come so far."""
        # Copies: more may arrive while the workers are being cancelled.
        return LoadRecord(
            at_once=self._shape.at_once,
            began_s=self._began_s or 0.0,
            seconds=len(self._tenths) * TENTH_S,
            tenths=tuple(self._tenths),
            answers=tuple(
                replace(answer, tokens=list(answer.tokens), arrivals=list(answer.arrivals)) for answer in self._answers
            ),
        )

    def _one_begun(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._all_begun.set()

    def _elapsed_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s

    def _arrived(self, count: int) -> None:
        if self._began_s is not None and (place := int(self._elapsed_s() / TENTH_S)) < len(self._tenths):
            self._tenths[place] += count


async def _ask(
    client: outrider.AsyncClient,
    answer: LoadAnswer,
    strategy: str,
    temperature: float,
    arrived: Callable[[int], None],
    clock: Clock = time.perf_counter,
) -> None:
    """Fill the answer as it comes; ``arrived`` hears of every chunk how many tokens it has."""
    request = answer.request
    options: Options = {
        "strategy": cast("outrider.Strategy", strategy),
        "seed": request.seed,
        "temperature": temperature,
        "max_tokens": request.max_tokens,
        "ignore_generation_config": True,
    }
    answer.sent_s = clock()
    async with client.stream(token_ids=request.token_ids, **options) as stream:
        async for chunk in stream:
            if not chunk.token_ids:
                continue
            answer.tokens += chunk.token_ids
            answer.arrivals.append((clock() - answer.sent_s, len(answer.tokens)))
            arrived(len(chunk.token_ids))
    answer.finished = True


async def _unless_one_fails(
    workers: Sequence[asyncio.Task[None]], until: Awaitable[object], longest_s: float | None
) -> None:
    """Wait for ``until``, at most ``longest_s``; raises what a worker raises, which else work without end."""
    ended = asyncio.ensure_future(until)
    try:
        done, _ = await asyncio.wait([*workers, ended], timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        ended.cancel()


async def _cancel(tasks: Sequence[asyncio.Task[object]] | Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
