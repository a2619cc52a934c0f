"""What metrics and traces take of the processor, beside a step of plain decoding.

    python -m lab.observation_cost [--model NAME] [--events 500] [--repeats 21] [--write cost.json]

Answers whose tokens take no time pass through what observes them: `ObservedRouter` (metrics of requests), `TracedRouter` and
`TracedVerifier` (spans, sent to a collector that keeps none), and `LoopMetrics` (metrics of steps). What that takes beside
the same answers unobserved is what observing costs, without a model's noise: microseconds of the processor for each step
(a step's tokens are one event) and for each request; medians of all repeats, in which everything takes turns. The share is
that of a step of plain decoding with `--model`, measured in the same run: the median of milliseconds between two tokens.

On Ray, numbers are handed on once a second by a thread of its own, which is not counted; a step's own part is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from opentelemetry.trace import Tracer
from rich.table import Table

from benchmarks.bench.environment import describe
from cluster.build import in_process
from cluster.models.target import resolve
from cluster.process.terminal import stdout
from cluster.settings.config import load
from lab.overhead import ask_router
from lab.span_sink import span_sink
from services.api.messages import ClientRequest, Completion, RequestedSampling, RouterPort, TextChunk, Timing
from services.metrics.observed_router import ObservedRouter
from services.metrics.prometheus_sink import PrometheusSink
from services.tracing.otlp_export import tracing_to
from services.tracing.request_spans import TracedRouter, TracedVerifier
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.loop_metrics import LoopMetrics
from services.verifier.engine.passes import Part, PassWork
from services.verifier.engine.singles import Singles
from services.verifier.engine.stats import LoopStats
from services.verifier.model.target_port import Rows
from speculation.messages import Finished, GenerationRequest, Progress
from speculation.ports import VerifierPort
from speculation.types import FinishReason, Plan, SamplingParams, SpeculationStats, Verdict

METRICS, TRACES = "metrics", "traces"
_REQUEST = ClientRequest(input="x", sampling=RequestedSampling(), strategy=None, tenant="")
_GENERATION = GenerationRequest(request_id="x", prompt=(1,), sampling=SamplingParams(), plan=Plan(strategy="autoregressive"))
_ENDED = Completion(
    request_id="x", finish_reason=FinishReason.LENGTH, stop=None, prompt_token_ids=(1,), completion_tokens=1,
    cached_tokens=0, seed=0, model="x", strategy="autoregressive", stats=SpeculationStats(),
    timing=Timing(queue_s=0.0, time_to_first_token_s=0.1, total_s=1.0),
)  # fmt: skip

# Handles an answer of so many events.
Answer = Callable[[int], Coroutine[Any, Any, None]]


class _InstantRouter:
    """A router whose answers take no time."""

    def __init__(self) -> None:
        self.events = 0

    async def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        for _ in range(self.events):
            yield TextChunk(text="x", token_ids=(1,))
        yield _ENDED


class _InstantVerifier:
    """A verifier whose answers take no time."""

    def __init__(self) -> None:
        self.events = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        for _ in range(self.events):
            yield Progress(token_ids=(1,))
        yield Finished(reason=FinishReason.LENGTH)


def read_from(instant: _InstantRouter | _InstantVerifier, observed: Any, request: object) -> Answer:
    """Answers of ``instant``, read through ``observed``."""

    async def answer(events: int) -> None:
        instant.events = events
        async for _ in observed.generate(request):
            pass

    return answer


def loop_steps(metrics: LoopMetrics | None) -> Answer:
    """Steps of a decoding loop with one request and no draft, counted by ``metrics``."""
    request = cast(LiveRequest, SimpleNamespace(grammar=None))
    rows = Rows(request_id="x", context=9, tokens=(1,), logits=1)
    part = Part(
        request=request, chain=rows.chain, verified=True, verdict=Verdict(accepted_path=(), committed=(1,), length=10)
    )
    part.rows = rows

    async def answer(events: int) -> None:
        for _ in range(events):
            if metrics is not None:
                metrics.step(PassWork(Singles([]), [part]), 0.008)

    return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedAndBare:
    """The same answers observed, and not."""

    kind: str
    observed: Answer
    bare: Answer


@contextmanager
def traced() -> Iterator[Tracer]:
    """A tracer whose spans go to a collector that keeps none."""
    with span_sink() as collector:
        tracing = tracing_to(collector, 1.0, "observation_cost")
        try:
            yield tracing.tracer
        finally:
            tracing.stop()


def comparisons(tracer: Tracer) -> dict[str, ObservedAndBare]:
    """All that observes, by name."""
    sink, stats = PrometheusSink(), LoopStats()
    router, verifier = _InstantRouter(), _InstantVerifier()
    asked, verified = cast(RouterPort, router), cast(VerifierPort, verifier)
    admission = cast(Any, SimpleNamespace(live=(), waiting=()))
    bare_router, bare_verifier = read_from(router, router, _REQUEST), read_from(verifier, verifier, _GENERATION)
    return {
        "requests (router)": ObservedAndBare(
            kind=METRICS, bare=bare_router, observed=read_from(router, ObservedRouter(asked, sink), _REQUEST)
        ),
        "steps (verifier)": ObservedAndBare(
            kind=METRICS, bare=loop_steps(None), observed=loop_steps(LoopMetrics(sink, stats, admission))
        ),
        "spans (router)": ObservedAndBare(
            kind=TRACES, bare=bare_router, observed=read_from(router, TracedRouter(asked, tracer, "x"), _REQUEST)
        ),
        "spans (verifier)": ObservedAndBare(
            kind=TRACES, bare=bare_verifier, observed=read_from(verifier, TracedVerifier(verified, tracer), _GENERATION)
        ),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What observing takes of the processor, in microseconds: medians."""

    kind: str
    per_step: float
    per_request: float


async def measure(found: dict[str, ObservedAndBare], events: int, repeats: int) -> dict[str, Cost]:
    """Everything by turns: answers of one event, and of many."""
    steps: dict[str, list[float]] = {name: [] for name in found}
    requests: dict[str, list[float]] = {name: [] for name in found}
    # The first repeat warms up.
    for repeat in range(repeats + 1):
        for name, each in found.items():
            one = await _cpu_us(each.observed, 1) - await _cpu_us(each.bare, 1)
            many = await _cpu_us(each.observed, events) - await _cpu_us(each.bare, events)
            if repeat:
                steps[name].append((many - one) / (events - 1))
                requests[name].append(one)
    return {
        name: Cost(kind=each.kind, per_step=statistics.median(steps[name]), per_request=statistics.median(requests[name]))
        for name, each in found.items()
    }


async def _cpu_us(answer: Answer, events: int) -> float:
    """Microseconds of this thread's processor time; what exports spans has threads of its own."""
    began = time.thread_time()
    await answer(events)
    return 1e6 * (time.thread_time() - began)


_STEP_TOKENS, _STEP_REPEATS = 48, 5


async def step_ms(model_name: str, extra: list[str]) -> float:
    """Milliseconds of a step of plain decoding without metrics: the median over repeats."""
    flags = [f"model={model_name}", "server.port=0", "server.ops_port=null", "metrics.export=none", *extra]
    settings = load(flags=flags)
    async with in_process(settings, resolve(settings.model, settings.cache_dir)) as pipeline:
        taken = []
        for _ in range(_STEP_REPEATS + 1):
            one, many = await ask_router(pipeline.router, 1), await ask_router(pipeline.router, _STEP_TOKENS)
            taken.append(1e3 * (many.seconds - one.seconds) / (_STEP_TOKENS - 1))
        return statistics.median(taken[1:])


def show(costs: dict[str, Cost], step: float) -> None:
    """Print the table."""
    title = f"microseconds of the processor; a step of plain decoding takes {step:.2f} ms"
    table = Table("", "per step", "of a step", "per request", title=title, title_justify="left")
    for kind in (METRICS, TRACES):
        of_kind = {name: cost for name, cost in costs.items() if cost.kind == kind}
        together = Cost(
            kind=kind,
            per_step=sum(cost.per_step for cost in of_kind.values()),
            per_request=sum(cost.per_request for cost in of_kind.values()),
        )
        for name, cost in {**{f"{kind}: {name}": cost for name, cost in of_kind.items()}, kind: together}.items():
            table.add_row(name, f"{cost.per_step:.2f}", f"{cost.per_step / step / 10:.3f} %", f"{cost.per_request:.1f}")
    stdout().print(table)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose step is compared; as for outrider serve")
    parser.add_argument("--events", type=int, default=500, help="of the long answers, at least 2")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server")
    parser.add_argument("--write", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    if arguments.events < 2 or arguments.repeats < 1:
        parser.error("--events must be at least 2, --repeats at least 1")
    step = asyncio.run(step_ms(arguments.model, arguments.set))
    with traced() as tracer:
        costs = asyncio.run(measure(comparisons(tracer), arguments.events, arguments.repeats))
    if arguments.write is not None:
        rows = {name: asdict(cost) for name, cost in costs.items()}
        told = {"machine": describe(0), "step_ms": step, "microseconds": rows}
        arguments.write.write_text(json.dumps(told, indent=1) + "\n")
    show(costs, step)


if __name__ == "__main__":
    main()
