"""A slow link between verifier and drafter, with and without drafts made ahead.

    python -m lab.link_delay [--delay-ms 0,2,10,50] [--ahead 0,4] [--strategies draft_model,fspad,suffix] [--tokens 64]
        [--set 'drafter.models=[FOLDER]' --strategies dflash]

The drafter has a process and a core of its own, the target another core. Every message takes --delay-ms in each direction.
Plain decoding takes turns with the strategies, and all answers are compared with its answers. `waited` is the share of steps
that waited for drafts at least a millisecond, `idle` the share of time in which the target did so, `ahead` the share of the
used drafts that were made before their step was decided.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count

from rich.progress import track
from rich.table import Table
from typing_extensions import override

from benchmarks.bench.prompts import BUILTIN, read_prompts
from benchmarks.soak.component import TOKEN, ComponentSpec
from benchmarks.soak.component_process import ComponentProcess
from benchmarks.soak.free_port import free_port
from cluster import build
from cluster.models.target import ResolvedModel, resolve
from cluster.process.terminal import stderr, stdout
from cluster.ray.stage_actors import launch_child
from cluster.settings import component_configs
from cluster.settings.config import load
from services.api.messages import ChatMessage, ClientRequest, RequestedSampling, TextChunk
from services.links.grpc_draft import GrpcDraftLink
from services.links.in_process import InProcessVerifierLink
from services.router.service import RouterService
from services.verifier.engine.stats import LoopStats, StepTimes
from services.verifier.service import VerifierService
from speculation.columns import DraftColumns
from speculation.messages import DraftingCall, DraftingReply
from speculation.ports import DraftReceiver

PLAIN = "autoregressive"
# Seconds from which a step counts as one that waited.
_WAITED_S = 0.001


class DelayedLink(GrpcDraftLink):
    """A link on which every message takes ``seconds`` more."""

    def __init__(self, port: int, seconds: float) -> None:
        async def resolve() -> str:
            return f"127.0.0.1:{port}"

        super().__init__(resolve, TOKEN)
        self._seconds = seconds

    @override
    async def start(self, receiver: DraftReceiver) -> None:
        await super().start(_Delayed(receiver, self._seconds))

    @override
    def _send(self, call: DraftingCall) -> None:
        asyncio.get_running_loop().call_later(self._seconds, super()._send, call)


class _Delayed:
    def __init__(self, receiver: DraftReceiver, seconds: float) -> None:
        self._receiver, self._seconds = receiver, seconds
        self.on_connected = receiver.on_connected

    def on_reply(self, reply: DraftingReply) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._receiver.on_reply, reply)

    def on_drafts(self, drafts: DraftColumns) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._receiver.on_drafts, drafts)


class CountedTimes(StepTimes):
    """Counts the steps that waited for drafts."""

    waited = 0

    @override
    def add(self, part: str, seconds: float) -> None:
        super().add(part, seconds)
        self.waited += part == "draft_wait" and seconds >= _WAITED_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The result of one strategy over all prompts.

    Attributes:
        tau: tokens per pass.
        waited: share of the steps that waited for drafts.
        idle: share of the time in which the target waited for drafts.
        ahead: share of the used drafts that were made ahead.
        answers: token ids.
    """

    tokens_per_s: float
    tau: float
    waited: float
    idle: float
    ahead: float
    answers: tuple[tuple[int, ...], ...]


@asynccontextmanager
async def drafter(model: ResolvedModel, flags: list[str], core: int) -> AsyncIterator[int]:
    """A drafter in a process on a core of its own; gives its port."""
    spec = ComponentSpec(
        role="drafter", port=free_port(), upstream=(), model=(model.name, str(model.path)), flags=tuple(flags)
    )
    process, own = ComponentProcess(spec), os.sched_getaffinity(0)
    # A process begins on the cores of its parent.
    os.sched_setaffinity(0, {core})
    process.launch()
    os.sched_setaffinity(0, own)
    try:
        await process.ready()
        yield spec.port
    finally:
        process.kill()


@asynccontextmanager
async def service(
    model: ResolvedModel, delay_s: float, ahead: int, core: int, more: list[str]
) -> AsyncIterator[tuple[RouterService, LoopStats]]:
    """Router and verifier in this process, with the drafter on ``core`` behind a ``DelayedLink``."""
    kept_nothing = ("drafter.keep_calibration=false", "verifier.keep_learnt=false")
    flags = [f"drafter.draft_ahead={ahead}", *kept_nothing, "verifier.threads=1", *more]
    settings = load(flags=flags)
    async with drafter(model, flags, core) as port, AsyncExitStack() as ended:
        origins = await build.origins(settings, model, DelayedLink(port, delay_s), ended)
        verifier = VerifierService(component_configs.verifier_config(settings, model), origins, launch_child)
        try:
            await verifier.start()
            verifier.loop.stats.times = CountedTimes()
            yield (
                RouterService(component_configs.router_config(settings, model), InProcessVerifierLink(verifier)),
                verifier.loop.stats,
            )
        finally:
            await verifier.stop()


_TENANTS = count()


async def measure(router: RouterService, stats: LoopStats, strategy: str, tokens: int) -> Measured:
    """Answer all built-in prompts one after the other, for a tenant of whom nothing is remembered."""
    tenant = f"tenant {next(_TENANTS)}"
    times = stats.times
    assert isinstance(times, CountedTimes)
    counts: Callable[[], tuple[float, ...]] = lambda: (  # noqa: E731
        times.steps,
        times.waited,
        times.seconds.get("draft_wait", 0.0),
        stats.drafts_used,
        stats.drafts_ahead,
    )
    before = counts()
    prompts = read_prompts(BUILTIN, 1)
    start = time.perf_counter()
    answers = []
    for prompt in prompts:
        request = ClientRequest(
            input=(ChatMessage(role="user", content=prompt.turns[0]),),
            sampling=RequestedSampling(temperature=0, max_tokens=tokens, ignore_generation_config=True),
            strategy=strategy,
            tenant=tenant,
        )
        found = [
            token async for event in router.generate(request) if isinstance(event, TextChunk) for token in event.token_ids
        ]
        answers.append(tuple(found))
    took = time.perf_counter() - start
    total = sum(map(len, answers))
    steps, waited, idle_s, used, ahead = (now - then for now, then in zip(counts(), before, strict=True))
    return Measured(
        tokens_per_s=total / took,
        tau=total / steps,
        waited=waited / steps,
        idle=idle_s / took,
        ahead=ahead / used if used else 0.0,
        answers=tuple(answers),
    )


async def run(arguments: argparse.Namespace, delay_ms: float) -> dict[str, list[Measured]]:
    """Measure plain decoding and each strategy with each value of --ahead by turns."""
    settings = load()
    model = resolve(settings.model, settings.cache_dir)
    cores = os.sched_getaffinity(0)
    own, beside = sorted(cores)[:2]
    os.sched_setaffinity(0, {own})
    results: dict[str, list[Measured]] = {}
    async with AsyncExitStack() as stack:
        running = {
            ahead: await stack.enter_async_context(service(model, delay_ms / 1e3, ahead, beside, arguments.set))
            for ahead in arguments.ahead
        }
        first = running[arguments.ahead[0]]
        for _ in track(range(arguments.repeats), f"{delay_ms:g} ms", console=stderr()):
            results.setdefault(PLAIN, []).append(await measure(*first, PLAIN, arguments.tokens))
            for strategy in arguments.strategies:
                for ahead, (router, stats) in running.items():
                    name = f"{strategy}, draft_ahead {ahead}"
                    results.setdefault(name, []).append(await measure(router, stats, strategy, arguments.tokens))
    os.sched_setaffinity(0, cores)
    return results


def rows(results: dict[str, list[Measured]]) -> list[tuple[str, ...]]:
    """Medians, a row for each strategy."""
    found = []
    plain = results[PLAIN]
    for name, several in results.items():
        middle = {
            field: statistics.median(getattr(one, field) for one in several)
            for field in ("tokens_per_s", "tau", "waited", "idle", "ahead")
        }
        over = statistics.median(one.tokens_per_s / other.tokens_per_s for one, other in zip(several, plain, strict=True))
        same = "yes" if all(one.answers == plain[0].answers for one in several) else "NO"
        shares = (f"{middle[field]:.0%}" for field in ("waited", "idle", "ahead"))
        found.append((name, f"{over:.2f}x", f"{middle['tau']:.2f}", *shares, same))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=_numbers, default=[0.0, 2.0, 10.0, 50.0], help="each way")
    parser.add_argument("--ahead", type=lambda text: [int(number) for number in _numbers(text)], default=[0, 4])
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=["draft_model", "fspad", "suffix"])
    parser.add_argument("--set", action="append", default=[], help="a setting of drafter and verifier, NAME=VALUE")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for delay_ms in arguments.delay_ms:
        table = Table(title=f"drafter {delay_ms:g} ms away, each way", title_justify="left")
        for column in ("", "of plain", "tokens per pass", "waited", "idle", "ahead", "tokens equal"):
            table.add_column(column)
        for row in rows(asyncio.run(run(arguments, delay_ms))):
            table.add_row(*row)
        stdout().print(table)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
