"""What lies around the decoding loop: OpenAI's HTTP API and gRPC.

    python -m lab.overhead [--model NAME] [--tokens 64] [--repeats 12] [--minutes 4] [--write overhead.json]

The same answers, greedy and without drafts, are streamed in three ways: read from the router inside the server's own
process, over gRPC with Outrider's client, and as server-sent events over HTTP. The two clients run in a process of their
own, on this machine. Everything takes turns in every repeat, so that what else the machine does meets all alike.

- `per request` is an answer of one token; `per token` is what each further token of a long answer adds. Both are in
  milliseconds, medians over all repeats, with the quartiles in brackets. The rows `over ...` are medians of differences
  within a repeat: what that way costs beside reading from the router. A difference whose brackets hold 0 is noise.

A drafted step gives several tokens at the price of one, so these costs per token are upper bounds.
`lab.step_breakdown` shows where the time goes inside a step, `lab.observation_cost` what metrics and traces
take of it. Ends with code 1 if two ways answer differently.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from rich.table import Table
from typing_extensions import override

import outrider
from benchmarks.bench.environment import describe
from cluster.build import in_process
from cluster.entry.public import opened_entry
from cluster.models.target import resolve
from cluster.process.terminal import stdout
from cluster.settings.config import load
from services.api.messages import ClientRequest, RequestedSampling, RouterPort, TextChunk

PROMPT = "Explain in three sentences why the sky is blue."
PLAIN = "autoregressive"
DIRECT, GRPC, HTTP = "in process", "gRPC", "HTTP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One answer: its text, and the seconds until its end."""

    text: str
    seconds: float


# Gives an answer of so many tokens.
Way = Callable[[int], Awaitable[Answered]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quartiles:
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """The spread of some values, two or more."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)

    @override
    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} .. {self.high:.3f})"


async def ask_router(router: RouterPort, tokens: int) -> Answered:
    """An answer read from the router in this process."""
    sampling = RequestedSampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, ignore_generation_config=True)
    request = ClientRequest(input=PROMPT, sampling=sampling, strategy=PLAIN, tenant="")
    began, text = time.perf_counter(), ""
    async for event in router.generate(request):
        if isinstance(event, TextChunk):
            text += event.text
    return Answered(text=text, seconds=time.perf_counter() - began)


def ask_grpc(address: str, tokens: int) -> Answered:
    """An answer over gRPC; the connection is made before the time begins."""
    with outrider.Client(address) as client:
        client.models()
        began, text = time.perf_counter(), ""
        with client.stream(
            PROMPT,
            strategy=cast("outrider.Strategy", PLAIN),
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            ignore_generation_config=True,
        ) as pieces:
            for piece in pieces:
                text += piece.text
        return Answered(text=text, seconds=time.perf_counter() - began)


def ask_http(url: str, tokens: int) -> Answered:
    """An answer over HTTP; the connection is made before the time begins."""
    body = {
        "prompt": PROMPT, "stream": True, "temperature": 0, "max_tokens": tokens, "ignore_eos": True,
        "ignore_generation_config": True, "speculation": {"strategy": PLAIN},
    }  # fmt: skip
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    connection.connect()
    try:
        began, text = time.perf_counter(), ""
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise SystemExit(f"the server answers {answer.status}: {answer.read().decode()}")
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"the server answers {event['error']}")
                text += "".join(choice["text"] for choice in event["choices"])
        return Answered(text=text, seconds=time.perf_counter() - began)
    finally:
        connection.close()


@asynccontextmanager
async def ways(model_name: str, extra: Sequence[str], clients: Executor) -> AsyncIterator[dict[str, Way]]:
    """The ways to one server, by name."""
    loop = asyncio.get_running_loop()

    def sent(ask: Callable[[str, int], Answered], address: str) -> Way:
        return lambda tokens: loop.run_in_executor(clients, ask, address, tokens)

    flags = (f"model={model_name}", "server.port=0", "server.http_port=0", "server.ops_port=null", "metrics.export=none")
    settings = load(flags=[*flags, *extra])
    model = resolve(settings.model, settings.cache_dir)
    async with (
        in_process(settings, model) as pipeline,
        opened_entry(pipeline.router, settings, pipeline.observing) as addresses,
    ):
        assert addresses.http is not None
        yield {
            DIRECT: lambda tokens: ask_router(pipeline.router, tokens),
            GRPC: sent(ask_grpc, addresses.grpc),
            HTTP: sent(ask_http, addresses.http),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one way took in one repeat: an answer of one token, and one of many."""

    one: Answered
    many: Answered
    tokens: int

    def per_request(self) -> float:
        """Milliseconds of an answer of one token."""
        return 1e3 * self.one.seconds

    def per_token(self) -> float:
        """Milliseconds that each further token adds."""
        return 1e3 * (self.many.seconds - self.one.seconds) / (self.tokens - 1)


async def measure(found: dict[str, Way], tokens: int, repeats: int, minutes: float) -> dict[str, list[Turn]]:
    """All ways by turns, in another order in every repeat."""
    turns: dict[str, list[Turn]] = {name: [] for name in found}
    for way in found.values():
        await way(1)
        await way(tokens)
    end = time.monotonic() + 60 * minutes
    for repeat in range(repeats):
        if repeat > 1 and time.monotonic() > end:
            break
        names = list(found)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            turns[name].append(Turn(one=await found[name](1), many=await found[name](tokens), tokens=tokens))
    texts = {turn.many.text for several in turns.values() for turn in several}
    if len(texts) != 1:
        raise SystemExit(f"the answers differ: {sorted(texts)}")
    return turns


Figure = Callable[[Turn], float]


def over(turns: dict[str, list[Turn]], name: str, base: str, figure: Figure) -> Quartiles:
    """How much more a way takes than another, in the same repeat."""
    return Quartiles.of([figure(turn) - figure(other) for turn, other in zip(turns[name], turns[base], strict=True)])


def report(turns: dict[str, list[Turn]]) -> dict[str, dict[str, Quartiles]]:
    """All figures, in milliseconds, by row and column."""
    found: dict[str, dict[str, Quartiles]] = {}
    columns: dict[str, Figure] = {"per request": Turn.per_request, "per token": Turn.per_token}
    for name in (DIRECT, GRPC, HTTP):
        found[name] = {column: Quartiles.of([figure(turn) for turn in turns[name]]) for column, figure in columns.items()}
    for name in (GRPC, HTTP):
        found[f"over {DIRECT}: {name}"] = {column: over(turns, name, DIRECT, figure) for column, figure in columns.items()}
    return found


def show(found: dict[str, dict[str, Quartiles]], tokens: int, repeats: int) -> None:
    """Print the table."""
    title = f"milliseconds, medians of {repeats} repeats (quartiles), answers of 1 and {tokens} tokens"
    table = Table("", "per request", "per token", title=title, title_justify="left")
    for name, row in found.items():
        table.add_row(name, *map(str, row.values()))
    stdout().print(table)


async def run(arguments: argparse.Namespace) -> dict[str, list[Turn]]:
    """Start the servers and measure."""
    own_process = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, own_process) as clients:
        async with ways(arguments.model, arguments.set or (), clients) as found:
            return await measure(found, arguments.tokens, arguments.repeats, arguments.minutes)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as for outrider serve; a small one shows more")
    parser.add_argument("--tokens", type=int, default=64, help="of the long answers, at least 2")
    parser.add_argument("--repeats", type=int, default=12, help="at least 2")
    parser.add_argument("--minutes", type=float, default=4.0, help="begin no repeat after so many")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="a setting of the servers")
    parser.add_argument("--write", type=Path, help="file for the figures as JSON")
    arguments = parser.parse_args()
    if arguments.tokens < 2 or arguments.repeats < 2:
        parser.error("--tokens and --repeats must be at least 2")
    turns = asyncio.run(run(arguments))
    found, repeats = report(turns), len(turns[DIRECT])
    if arguments.write is not None:
        rows = {name: {column: asdict(spread) for column, spread in row.items()} for name, row in found.items()}
        told = {"machine": describe(0), "tokens": arguments.tokens, "repeats": repeats, "milliseconds": rows}
        arguments.write.write_text(json.dumps(told, indent=1) + "\n")
    show(found, arguments.tokens, repeats)


if __name__ == "__main__":
    main()
