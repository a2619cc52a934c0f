"""The cost of a draft model where it does not pay, in processor time: a busy machine hardly changes that.

    python -m lab.left_out_cost --models FOLDER [--set drafter.streaming_form=one_pass] [--minutes 10] [--prompts builtin]

Three services in this process answer the same prompts by turns, greedily: without models, without models again, and with
them. An answer costs what the process uses meanwhile: target, drafters and everything around them, on all threads. Answers
are compared in pairs, by prompt and turn; `again` shows what is noise. The budget decides for each request whether the
model drafts for it; answers of which it is left out stand in a line of their own, and so do those in which it drafts. With
streams in the target's pass, `stream_rows` over `rows` bounds their share of the passes' work: a stream row counts as the
share of the layers that it goes through. Run it on one core (taskset -c 0), so that threads that wait do not count. Ends
with code 1 if two answers differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import override

from benchmarks.bench.environment import describe
from benchmarks.bench.prompts import BUILTIN, read_prompts
from cluster.build import Pipeline, in_process
from cluster.models.target import BUILT_IN, resolve
from cluster.settings.config import load
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from services.verifier.engine.stats import LoopStats

WITHOUT, AGAIN, WITH = "without", "again", "with"
# Seconds after an answer in which drafters may still be at work for it.
_SETTLES_S = 0.05
# Of a normal distribution, within so many deviations lie 95 %.
_DEVIATIONS = 1.96


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerCost:
    """One answer and what it took.

    Attributes:
        cpu_s: seconds of the processor, all threads together; ``wall_s``: of the clock; ``waited_s``: for drafts.
        used: a costly source drafted for it, at least at first.
        rows, stream_rows, observed: of its passes, as in ``LoopStats``.
    """

    tokens: tuple[int, ...]
    cpu_s: float
    wall_s: float
    waited_s: float
    passes: int
    used: bool
    rows: int
    stream_rows: float
    observed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRatio:
    """What answers of one service cost beside those of another.

    Attributes:
        count: pairs.
        median: of the pairs' ratios; between ``low`` and ``high`` with 95 % confidence, whatever the distribution.
        whole: all seconds of one over all of the other.
    """

    count: int
    median: float
    low: float
    high: float
    whole: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> CostRatio:
        """Of (seconds, seconds of the other); at least one."""
        ratios, count = sorted(own / other for own, other in pairs), len(pairs)
        beside = _DEVIATIONS * math.sqrt(count) / 2
        low, high = math.floor(count / 2 - beside), math.ceil(count / 2 + beside)
        return cls(
            count=count,
            median=statistics.median(ratios),
            low=ratios[max(0, low)],
            high=ratios[min(count - 1, high)],
            whole=sum(own for own, _ in pairs) / sum(other for _, other in pairs),
        )

    @override
    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f} .. {self.high:.4f}), whole {self.whole:.4f}, {self.count} pairs"


def compare(with_it: Iterable[AnswerCost], without: Iterable[AnswerCost]) -> dict[str, CostRatio]:
    """Processor time per answer, and per pass of an answer, of answers in pairs: all, and by whether a source was used."""
    pairs = list(zip(with_it, without, strict=True))
    found = {}
    for name, kept in (("all", pairs), ("left out", _of(pairs, False)), ("drafting", _of(pairs, True))):
        if kept:
            found[f"{name}, per answer"] = CostRatio.of([(own.cpu_s, other.cpu_s) for own, other in kept])
            found[f"{name}, per pass"] = CostRatio.of(
                [(own.cpu_s / own.passes, other.cpu_s / other.passes) for own, other in kept]
            )
    return found


def _of(pairs: Sequence[tuple[AnswerCost, AnswerCost]], used: bool) -> list[tuple[AnswerCost, AnswerCost]]:
    return [pair for pair in pairs if pair[0].used == used]


class ComparedService:
    """One of the services, with what its loop has counted so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def _stats(self) -> LoopStats:
        return self._pipeline.verifier.loop.stats

    async def answer(self, prompt: str, tokens: int, strategy: str) -> AnswerCost:
        """One greedy answer of so many tokens."""
        sampling = RequestedSampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, ignore_generation_config=True)
        request = ClientRequest(input=prompt, sampling=sampling, strategy=strategy, tenant="")
        before, began, cpu = self._counted(), time.perf_counter(), time.process_time()
        events = self._pipeline.router.generate(request)
        written = [token async for event in events if isinstance(event, TextChunk) for token in event.token_ids]
        wall_s = time.perf_counter() - began
        await asyncio.sleep(_SETTLES_S)
        cpu_s = time.process_time() - cpu
        more = {name: count - before[name] for name, count in self._counted().items()}
        return AnswerCost(
            tokens=tuple(written),
            cpu_s=cpu_s,
            wall_s=wall_s,
            waited_s=more["waited"],
            passes=round(more["passes"]),
            used=more["used"] > 0,
            rows=round(more["rows"]),
            stream_rows=more["stream_rows"],
            observed=round(more["observed"]),
        )

    def _counted(self) -> dict[str, float]:
        stats = self._stats
        used = (reasons.get(why, 0) for reasons in stats.source_choices.values() for why in ("trial", "pays"))
        return {
            "waited": stats.times.seconds.get("draft_wait", 0.0),
            "passes": stats.times.steps,
            "used": sum(used),
            "rows": stats.rows,
            "stream_rows": stats.stream_rows,
            "observed": stats.rows_observed,
        }


@asynccontextmanager
async def services(model: str, models: Sequence[Path], extra: Sequence[str]) -> AsyncIterator[dict[str, ComparedService]]:
    """The three services by name, each warm."""
    common = (f"model={model}", "drafter.keep_calibration=false", "verifier.keep_learnt=false", "metrics.export=none")
    none, named = ("drafter.models=[]",), (f"drafter.models=[{', '.join(map(str, models))}]", *extra)
    async with AsyncExitStack() as stack:
        found = {}
        for name, flags in ((WITHOUT, none), (AGAIN, none), (WITH, named)):
            settings = load(flags=[*common, *flags])
            pipeline = in_process(settings, resolve(settings.model, settings.cache_dir))
            found[name] = ComparedService(await stack.enter_async_context(pipeline))
            await found[name].answer("Hello", 16, "autoregressive")
        yield found


async def measure(
    found: dict[str, ComparedService], prompts: Sequence[str], tokens: int, strategy: str, minutes: float
) -> dict[str, list[AnswerCost]]:
    """All services by turns, in another order each time, until the time is over; whole rounds only."""
    answers: dict[str, list[AnswerCost]] = {name: [] for name in found}
    end, names = time.monotonic() + 60 * minutes, list(found)
    number = 0
    while not number or time.monotonic() < end:
        turn, prompt = number % len(names), prompts[number % len(prompts)]
        for name in names[turn:] + names[:turn]:
            answers[name].append(await found[name].answer(prompt, tokens, strategy))
        if len({several[-1].tokens for several in answers.values()}) != 1:
            raise SystemExit(f"the answers differ: {prompt!r}")
        number += 1
    return answers


def show(answers: dict[str, list[AnswerCost]]) -> None:
    """Print the comparison."""
    print("seconds of the processor over those without models: median (95 % of it), whole")
    for name in (AGAIN, WITH):
        for what, ratio in compare(answers[name], answers[WITHOUT]).items():
            print(f"{name}: {what}: {ratio}")
    for name, several in answers.items():
        rows, stream_rows = sum(each.rows for each in several), sum(each.stream_rows for each in several)
        print(
            f"{name}: {sum(each.passes for each in several)} passes, {rows} rows, stream rows: {stream_rows:.1f} "
            f"({stream_rows / rows:.2%}) in {sum(each.stream_rows > 0 for each in several)} answers, "
            f"states of {sum(each.observed for each in several)} rows kept; waited "
            f"{sum(each.waited_s for each in several):.2f} s of {sum(each.wall_s for each in several):.1f} s"
        )


async def _run(arguments: argparse.Namespace) -> dict[str, list[AnswerCost]]:
    prompts = [prompt.turns[0] for prompt in read_prompts(arguments.prompts)]
    async with services(arguments.model, arguments.models, arguments.set or ()) as found:
        return await measure(found, prompts, arguments.tokens, arguments.strategy, arguments.minutes)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILT_IN, help="as for outrider serve")
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders of weights that draft")
    parser.add_argument("--strategy", default="blend", help="of all requests")
    parser.add_argument("--prompts", default=BUILTIN, help="as for outrider bench")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no round after so many")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="a setting of the service with the models")
    parser.add_argument("--write", type=Path, help="file for all answers' figures as JSON")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error("--tokens must be at least 1")
    answers = asyncio.run(_run(arguments))
    show(answers)
    if arguments.write is not None:
        kept = {name: [asdict(each) for each in several] for name, several in answers.items()}
        arguments.write.write_text(json.dumps({"machine": describe(0), "answers": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
