"""What somebody who sees only sizes and times of an answer's encrypted events can tell of it; on a simulated clock.

Forty prompts give answers of the same length, whose decoding goes the same way each time but for some steps: that is what
arXiv 2411.01076 tells prompts apart by. The same is tried with private answers.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from services.access.gate import open_gate
from services.api.config import HttpConfig, PublicServerConfig
from services.api.grpc.messages import decode_request, encode_event
from services.api.http.app import HttpApp
from services.api.http.responses.stored_responses import ResponsesInMemory
from services.api.messages import ClientRequest, Completion, RequestedSampling, TextChunk, Timing
from services.privacy.config import Privacy
from services.privacy.even_router import EvenRouter
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig
from speculation.errors import InvalidArgument, Unavailable
from speculation.types import FinishReason, Report, SpeculationStats
from tests.engine.simulated import run
from tests.running.refusals import refuses
from tests.servers.scripted_router import ScriptedRouter

PROMPTS, TOKENS, PASS_S = 40, 96, 0.04
PRIVACY = Privacy(tokens=8, interval_s=0.5)
# Of each event: seconds since the start, and bytes.
Trace = list[tuple[float, int]]


class Decoding(ScriptedRouter):
    """Answers the prompt that its first token names, in steps as long as drafts go right there."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.fails_after: int | None = None

    @override
    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        self.asked.append(request)
        assert isinstance(request.input, tuple) and isinstance(request.input[0], int)
        steps, told, shown = random.Random(request.input[0]), 0, 0
        while told < TOKENS:
            usual, sizes = steps.randint(1, 6), random.Random(steps.random())
            # One step in fifty goes another way than usual.
            size = min(usual if self.random.random() > 1 / 50 else self.random.randint(1, 6), TOKENS - told)
            await asyncio.sleep(PASS_S + 0.004 * size + self.random.gauss(0, 0.001))
            if self.fails_after is not None and told >= self.fails_after:
                raise Unavailable("the verifier is gone")
            words = ["x" * sizes.randint(1, 9) for _ in range(size)]
            ends = [shown + sum(map(len, words[: at + 1])) for at in range(size)]
            shown = ends[-1]
            yield TextChunk(text="".join(words), token_ids=tuple(range(told, told + size)), text_ends=tuple(ends))
            told += size
        stats = SpeculationStats(
            num_spec_steps=told // 2, num_draft_tokens=steps.randrange(200), num_committed_tokens=told, seconds_saved=0.25
        )
        yield Completion(
            request_id=request.request_id, finish_reason=FinishReason.LENGTH, stop=None, prompt_token_ids=(1,),
            completion_tokens=TOKENS, cached_tokens=steps.randrange(100), seed=1, model="scripted", strategy="auto",
            rule="by-load", stats=stats, timing=Timing(queue_s=steps.random(), time_to_first_token_s=steps.random(), total_s=1.0),
        )  # fmt: skip


def asked(prompt: int, **changes: Any) -> ClientRequest:
    return ClientRequest(input=(prompt,), sampling=RequestedSampling(max_tokens=TOKENS), **changes)


async def over_grpc(prompt: int, seed: int, private: bool) -> Trace:
    router, clock, trace = EvenRouter(Decoding(seed), PRIVACY), asyncio.get_running_loop().time, []
    began = clock()
    async for event in router.generate(asked(prompt, private=private)):
        message = encode_event(event, PRIVACY.padding(private))
        trace.append((clock() - began, message.ByteSize()))
    return trace


async def over_http(prompt: int, seed: int, private: bool) -> Trace:
    config = HttpConfig(port=0, public=PublicServerConfig(port=0, privacy=PRIVACY))
    app = HttpApp(EvenRouter(Decoding(seed), PRIVACY), config, open_gate(), ResponsesInMemory(config.responses))
    body = {"prompt": [prompt], "max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    if private:
        body["privacy"] = "strict"
    clock, trace = asyncio.get_running_loop().time, []
    began, sent = clock(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if sent.is_set():
            await asyncio.Event().wait()
        sent.set()
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            trace.append((clock() - began, len(message["body"])))
            assert b'"error"' not in message["body"], message["body"]

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-request-id", b"r")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    return trace


Watch = Callable[[int, int, bool], Coroutine[Any, Any, Trace]]


def told_apart(watch: Watch, *, private: bool) -> tuple[float, set[tuple[tuple[float, int], ...]]]:
    """How many of the prompts' last answers are nearest to the centroid of their first ones; and all different traces."""

    async def main() -> list[list[Trace]]:
        return [[await watch(prompt, 1000 * prompt + each, private) for each in range(5)] for prompt in range(PROMPTS)]

    traces = run(main())
    longest = max(len(trace) for own in traces for trace in own)

    def features(trace: Trace) -> np.ndarray:
        times = np.diff([0.0, *(at for at, _ in trace)]) / 0.004
        sizes = np.array([size for _, size in trace], dtype=float) / 16
        return np.concatenate([np.pad(values, (0, longest - len(trace))) for values in (times, sizes)])

    centroids = np.array([np.mean([features(trace) for trace in own[:-1]], axis=0) for own in traces])
    right = sum(
        int(np.argmin(np.linalg.norm(centroids - features(own[-1]), axis=1))) == prompt for prompt, own in enumerate(traces)
    )
    return right / PROMPTS, {tuple((round(at, 9), size) for at, size in trace) for own in traces for trace in own}


@pytest.mark.examples(2)
@pytest.mark.parametrize("watch", [over_grpc, over_http])
def test_prompts_are_told_apart_without_privacy_and_not_with_it(watch: Watch) -> None:
    without, _ = told_apart(watch, private=False)
    within, traces = told_apart(watch, private=True)
    print(f"told apart: {without:.0%} without privacy, {within:.0%} with it")
    assert without >= 0.75, "there must be something to hide"
    assert within <= 2 / PROMPTS
    # Nothing is left to learn from, by any classifier.
    assert len(traces) == 1


async def collected(router: EvenRouter, request: ClientRequest) -> tuple[list[TextChunk], list[Completion]]:
    chunks, ends = [], []
    async for event in router.generate(request):
        (ends if isinstance(event, Completion) else chunks).append(event)  # type: ignore[arg-type]
    return chunks, ends  # type: ignore[return-value]


def test_the_answer_is_the_same_and_its_report_says_nothing() -> None:
    async def main() -> None:
        inner = Decoding(3)
        usual, (end,) = await collected(EvenRouter(inner, PRIVACY), asked(5))
        chunks, (private,) = await collected(EvenRouter(Decoding(3), PRIVACY), asked(5, private=True))
        for name in ("text", "token_ids", "text_ends"):
            parts, others = ([part for chunk in each for part in getattr(chunk, name)] for each in (usual, chunks))
            assert parts == others, name
        assert [len(chunk.token_ids) for chunk in chunks] == [8] * (TOKENS // 8)
        assert (end.cached_tokens, end.stats.num_spec_steps) != (0, 0)
        assert (end.stats.seconds_saved, private.stats.seconds_saved) == (0.25, 0.0)
        assert (private.cached_tokens, private.stats, private.timing.queue_s) == (0, SpeculationStats(), 0.0)
        assert (end.rule, private.rule) == ("by-load", "")
        assert (private.finish_reason, private.seed, private.completion_tokens) == (end.finish_reason, 1, TOKENS)

    run(main())


def test_what_is_shared_and_drafted_from() -> None:
    async def main() -> None:
        inner = Decoding(1)
        router = EvenRouter(inner, replace(PRIVACY, mode="strict"))
        for _ in range(2):
            await collected(router, asked(1, cache_salt="own"))
        salts = {request.cache_salt for request in inner.asked}
        assert len(salts) == 2 and "own" not in salts
        assert all(request.private for request in inner.asked)
        with refuses(
            InvalidArgument,
            field="privacy",
            value="none",
            allowed="strict, or unset: all answers of this server are private",
        ):
            router.generate(asked(1, private=False))

    run(main())
    config = StrategyConfig(retrieval=True, semantic=True)
    for name in ("auto", "blend", "suffix"):
        plan = make_plan(asked(1, strategy=name, private=True), config)
        assert plan.sources and not {"retrieval", "semantic"} & set(plan.sources)
    assert "retrieval" in make_plan(asked(1, strategy="blend"), config).sources
    assert not make_plan(asked(1, strategy="autoregressive", private=True), config).speculates
    with refuses(InvalidArgument, field="speculation.strategy", value="rest"):
        make_plan(asked(1, strategy="rest", private=True), config)


def test_an_error_comes_after_what_came_before_it_and_leaving_ends_the_decoding() -> None:
    async def main() -> None:
        inner = Decoding(2)
        inner.fails_after = 20
        events = EvenRouter(inner, PRIVACY).generate(asked(1, private=True))
        chunks: list[Any] = []

        async def follow() -> None:
            async for event in events:
                chunks.append(event)

        with pytest.raises(Unavailable):
            await follow()
        assert [len(chunk.token_ids) for chunk in chunks[:2]] == [8, 8]
        assert sum(len(chunk.token_ids) for chunk in chunks) >= 20
        events = EvenRouter(Decoding(2), PRIVACY).generate(asked(1, private=True))
        await anext(events)
        await events.aclose()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "private-answer"]

    run(main())


def test_what_requests_may_say() -> None:
    from outrider.requests import build_request

    for said, private in (("strict", True), ("none", False), (None, None)):
        wire = build_request("x", None, None, {"privacy": said})
        assert decode_request(wire, tenant=None).private is private
    with refuses(InvalidArgument, field="privacy", value="loose", allowed="none or strict"):
        decode_request(build_request("x", None, None, {"privacy": "loose"}), tenant=None)


@pytest.mark.parametrize("report", ["sources", "trees"])
def test_reports_of_drafts_are_refused(report: Report) -> None:
    router = EvenRouter(Decoding(2), PRIVACY)
    with refuses(InvalidArgument, field="speculation.report", value=report, allowed="none, or unset: the answer is private"):
        router.generate(asked(1, private=True, report=report))
    strict = EvenRouter(Decoding(2), replace(PRIVACY, mode="strict"))
    allowed = "none, or unset: all answers of this server are private"
    with refuses(InvalidArgument, field="speculation.report", value=report, allowed=allowed):
        strict.generate(asked(1, report=report))


def test_comparisons_are_refused() -> None:
    with refuses(InvalidArgument, field="speculation.compare", value="suffix", allowed="unset: the answer is private"):
        EvenRouter(Decoding(2), PRIVACY).generate(asked(1, private=True, compare=("suffix",)))


def test_groups_are_refused() -> None:
    with refuses(InvalidArgument, field="speculation.group", value="g", allowed="unset: the answer is private"):
        EvenRouter(Decoding(2), PRIVACY).generate(asked(1, private=True, group="g"))
