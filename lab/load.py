"""Many users at once: throughput, time to first token and inter-token latency at each concurrency.

    python -m lab.load [--strategies autoregressive,prompt_lookup] [--concurrency 1,2,4,8,16,32] [--repeats 3]
    python -m lab.load --long-prompt 6000         (a long prompt arrives beside four streams)

Everything runs in this process. At every concurrency the strategies take turns; plain decoding is always one of them.
`outrider bench --help` explains the columns; ratios compare tokens per second with plain decoding in the same repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from benchmarks.bench.contestants import PLAIN, answer_of, order_of
from benchmarks.bench.measure import Measurements, Schedule, measure
from benchmarks.bench.measures import answers_of, by_repeat, latencies, percentile, ratio, speed
from benchmarks.bench.prompts import BUILTIN, make_requests, read_prompts
from benchmarks.bench.records import Cell, LoadOutcome, LoadPoint, Request
from benchmarks.peers.peer_outrider import Peer
from cluster import build
from cluster.models.target import ResolvedModel, resolve
from cluster.settings.config import Settings, load
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from services.router.tokens import Tokens
from speculation.errors import OutriderError
from speculation.sources import STRATEGIES

STREAMS = 4
# At least the width of the table, even on a narrower terminal.
console = Console(width=max(116, shutil.get_terminal_size().columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class Direct:
    """Implements ``Contestant`` by a strategy on the engine in this process."""

    name: str
    peer: Peer
    most_at_once: int | None = None

    def run(self, load: LoadPoint) -> LoadOutcome:
        reply = self.peer.run(self.name, order_of(load))
        return LoadOutcome(answers=tuple(map(answer_of, reply["answers"])), wall_s=reply["wall_s"], loop=reply["loop"])


def users(settings: Settings, model: ResolvedModel, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all strategies at all concurrencies; returns a row for each pair."""
    tokens = Tokens(str(model.path))
    peer = Peer({"settings": settings.model_dump(mode="json"), "model": model.name, "model_path": str(model.path)})
    contestants = [Direct(name=name, peer=peer) for name in arguments.strategies]
    found = Measurements()
    try:
        first_turns = [replace(prompt, turns=prompt.turns[:1]) for prompt in read_prompts(arguments.prompts)]
        pool = make_requests(first_turns, tokens, lambda _: (), seed=0)
        contestants[0].run(_warm_up(pool))
        for concurrency in track(arguments.concurrency, "Measuring", console=console):
            schedule = Schedule(
                concurrency=(concurrency,), repeats=arguments.repeats, max_tokens=arguments.tokens, temperature=0.0
            )
            measure(contestants, _requests(pool, concurrency), schedule, found)
    finally:
        peer.close()
    return [_row(found.cells, name, at) for at in arguments.concurrency for name in arguments.strategies]


def _warm_up(pool: Sequence[Request]) -> LoadPoint:
    return LoadPoint(requests=tuple(pool[:1]), concurrency=1, max_tokens=8, temperature=0.0, tenant="warm-up")


def _requests(pool: Sequence[Request], concurrency: int) -> list[Request]:
    """Two requests per user and at least four, with tasks mixed."""
    by_task: dict[str, list[Request]] = {}
    for request in pool:
        by_task.setdefault(request.task, []).append(request)
    mixed = [request for hand in zip(*by_task.values(), strict=False) for request in hand]
    # With one common task, a round contains all requests at any concurrency.
    wanted = max(4, 2 * concurrency)
    return [
        Request(id=f"{request.id} {number}", task="mixed", prompt=request.prompt, seed=request.seed)
        for number, request in enumerate((mixed * (wanted // len(mixed) + 1))[:wanted])
    ]


def _row(cells: Sequence[Cell], name: str, concurrency: int) -> dict[str, Any]:
    own = [cell for cell in cells if cell.contestant == name and cell.concurrency == concurrency]
    plain = [cell for cell in cells if cell.contestant == PLAIN and cell.concurrency == concurrency]
    same = [cell.outcome.answers[i].tokens == other.outcome.answers[i].tokens
            for cell, other in zip(own, plain, strict=True) for i in range(len(cell.outcome.answers))]  # fmt: skip
    return {
        "strategy": name,
        "concurrency": concurrency,
        "tokens_per_second": by_repeat(own, speed).as_object(),
        "over_plain": ratio(own, plain).as_object(),
        "equal_answers": sum(same),
        "answers": len(same),
        **latencies(answers_of(own)),
    }


async def beside_a_long_prompt(settings: Settings, model: ResolvedModel, length: int) -> dict[str, Any]:
    """Gaps between the arrivals of four streams, before and while a prompt of ``length`` tokens is processed beside them.

    All times in seconds; ``bound_s`` is ``verifier.max_step_s``, the limit on one step.
    """
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    async with build.in_process(settings, model) as pipeline:

        async def stream(prompt: tuple[int, ...], tokens: int, into: list[float]) -> None:
            params = RequestedSampling(
                temperature=0, max_tokens=tokens, ignore_eos=True, seed=0, ignore_generation_config=True
            )
            request = ClientRequest(input=prompt, sampling=params, strategy=PLAIN, tenant="")
            async for event in pipeline.router.generate(request):
                if isinstance(event, TextChunk) and event.token_ids:
                    into.append(time.perf_counter())

        streams = [asyncio.create_task(stream((40 + i, 41, 42) * 12, 10_000, into)) for i, into in enumerate(arrivals)]
        while min(map(len, arrivals)) < 40:  # noqa: ASYNC110  # a benchmark may look at the clock
            await asyncio.sleep(0.05)
        first: list[float] = []
        started = time.perf_counter()
        long = tuple(1000 + 7 * position % 3000 for position in range(length))
        await stream(long, 1, first)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    def gaps(begin: float, end: float) -> list[float]:
        return [b - a for own in arrivals for a, b in pairwise(own) if begin <= b <= end]

    before, during = gaps(0, started), gaps(started, first[0])
    return {
        "prompt_tokens": length,
        "bound_s": settings.verifier.max_step_s,
        "before": {"median_s": percentile(before, 0.5), "longest_s": max(before)},
        "during": {"median_s": percentile(during, 0.5), "p99_s": percentile(during, 0.99), "longest_s": max(during)},
        "first_token_of_the_prompt_s": first[0] - started,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(
        "at once",
        Column("strategy", no_wrap=True),
        "tok/s",
        Column("/ plain", no_wrap=True),
        "TTFT",
        "95th",
        "ITL",
        "longest gap",
        "equal",
        box=None,
    )
    for row in rows:
        over = row["over_plain"]
        table.add_row(
            str(row["concurrency"]), row["strategy"], f"{row['tokens_per_second']['median']:.1f}",
            f"{over['median']:.2f} ({over['low']:.2f}-{over['high']:.2f})",
            *(f"{1e3 * row[key]:.0f} ms" for key in ("ttft_median_s", "ttft_p95_s", "itl_median_s", "gap_p99_s")),
            f"{row['equal_answers']}/{row['answers']}",
        )  # fmt: skip
    console.print(table)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a plot (SVG) of throughput, time to first token and inter-token latency by concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "tokens per second": lambda row: row["tokens_per_second"]["median"],
        "time to first token, s (median)": lambda row: row["ttft_median_s"],
        "inter-token latency, ms (median)": lambda row: 1e3 * row["itl_median_s"],
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.8), layout="constrained")
    for plot, (title, value) in zip(axes, panels.items(), strict=True):
        for name in dict.fromkeys(row["strategy"] for row in rows):
            own = [row for row in rows if row["strategy"] == name]
            plot.plot([row["concurrency"] for row in own], [value(row) for row in own], marker="o", label=name)
        levels = sorted({row["concurrency"] for row in rows})
        plot.set_xscale("log", base=2)
        plot.set_xticks(levels, [str(level) for level in levels])
        plot.set_ylim(bottom=0)
        plot.set_title(title, loc="left", fontsize=10)
        plot.set_xlabel("requests at once")
        plot.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as in `outrider serve`; default: the built-in one")
    parser.add_argument("--strategies", default=f"{PLAIN},prompt_lookup", help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32", help="requests at once, comma-separated")
    parser.add_argument("--prompts", default=BUILTIN, help="as in `outrider bench`")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long-prompt", type=int, help="measure this instead: so many tokens arrive beside four streams")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="a setting")
    parser.add_argument("--out", type=Path, help="folder for load.json and load.svg")
    arguments = parser.parse_args()
    arguments.strategies = list(dict.fromkeys([PLAIN, *arguments.strategies.split(",")]))
    if unknown := [name for name in arguments.strategies if name not in STRATEGIES]:
        parser.error(f"--strategies: there is no {unknown[0]!r}; there are {', '.join(STRATEGIES)}")
    if not all(part.isdecimal() and int(part) for part in arguments.concurrency.split(",")):
        parser.error(f"--concurrency is {arguments.concurrency}: must be numbers from 1, comma-separated")
    arguments.concurrency = [int(part) for part in arguments.concurrency.split(",")]
    if min(arguments.tokens, arguments.repeats) < 1 or (arguments.long_prompt is not None and arguments.long_prompt < 1):
        parser.error("--tokens, --repeats and --long-prompt must be at least 1")
    try:
        settings = load(None, [*([f"model={arguments.model}"] if arguments.model else []), *arguments.set])
        model = resolve(settings.model, settings.cache_dir, say=console.print)
        if arguments.long_prompt is not None:
            result: Any = asyncio.run(beside_a_long_prompt(settings, model, arguments.long_prompt))
            console.print_json(json.dumps(result))
        else:
            result = users(settings, model, arguments)
            show(result)
    except OutriderError as error:
        parser.error(str(error))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "load.json").write_text(json.dumps(result, indent=1))
        if arguments.long_prompt is None:
            draw(result, arguments.out / "load.svg")
        console.print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
