"""A slow link between verifier and drafter, with and without draft-ahead.

    python -m lab.link_delay [--delay-ms 10] [--ahead 0,4] [--strategy blend] [--tokens 64] [--repeats 3]

Every message takes --delay-ms in each direction. `idle` is the share of time in which the target waits for drafts. `ahead`
is the share of the used drafts that were sent before their step was decided. Plain decoding takes turns with the strategy,
and all answers are compared with its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from rich.progress import track
from rich.table import Table

from benchmarks.bench.prompts import BUILTIN, read_prompts
from cluster import build
from cluster.models.target import ResolvedModel, resolve
from cluster.process.terminal import stderr, stdout
from cluster.ray.stage_actors import launch_child
from cluster.settings.config import load
from services.api.messages import ChatMessage, ClientRequest, RequestedSampling, TextChunk
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink, InProcessVerifierLink
from services.router.service import RouterService
from services.verifier.engine.stats import LoopStats
from services.verifier.service import VerifierService
from speculation.messages import DraftingCall, DraftingReply
from speculation.ports import DraftReceiver

PLAIN = "autoregressive"


class DelayedLink(InProcessDraftLink):
    """A link on which every message takes ``seconds``."""

    def __init__(self, drafter: DrafterService, seconds: float) -> None:
        super().__init__(drafter)
        self._seconds = seconds

    async def start(self, receiver: DraftReceiver) -> None:
        await super().start(_Delayed(receiver, self._seconds))

    def _send(self, call: DraftingCall) -> None:
        asyncio.get_running_loop().call_later(self._seconds, super()._send, call)


class _Delayed:
    def __init__(self, receiver: DraftReceiver, seconds: float) -> None:
        self._receiver, self._seconds = receiver, seconds
        self.on_connected = receiver.on_connected

    def on_reply(self, reply: DraftingReply) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._receiver.on_reply, reply)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The result of one strategy over all prompts.

    Attributes:
        tau: tokens per pass.
        idle: share of the time in which the target waited for drafts.
        ahead: share of the used drafts that were made ahead.
        answers: token ids.
    """

    tokens_per_s: float
    tau: float
    idle: float
    ahead: float
    answers: tuple[tuple[int, ...], ...]


@asynccontextmanager
async def service(model: ResolvedModel, delay_s: float, ahead: int) -> AsyncIterator[tuple[RouterService, LoopStats]]:
    """All components in this process, with the drafter behind a ``DelayedLink``."""
    settings = load(flags=[f"drafter.draft_ahead={ahead}", "drafter.keep_calibration=false"])
    link = DelayedLink(DrafterService(build.drafter_config(settings, model)), delay_s)
    origins = await build.origins(settings, model, link)
    verifier = VerifierService(build.verifier_config(settings, model), origins, launch_child)
    try:
        await verifier.start()
        yield RouterService(build.router_config(settings, model), InProcessVerifierLink(verifier)), verifier.loop.stats
    finally:
        await verifier.stop()


async def measure(router: RouterService, stats: LoopStats, strategy: str, tokens: int) -> Measured:
    """Answer all built-in prompts one after the other."""
    before = (stats.times.steps, stats.times.seconds.get("draft_wait", 0.0), stats.drafts_used, stats.drafts_ahead)
    prompts = read_prompts(BUILTIN, 1)
    start = time.perf_counter()
    answers = []
    for prompt in prompts:
        request = ClientRequest(
            input=(ChatMessage(role="user", content=prompt.turns[0]),),
            sampling=RequestedSampling(temperature=0, max_tokens=tokens, ignore_generation_config=True),
            strategy=strategy,
            tenant="",
        )
        found = [
            token async for event in router.generate(request) if isinstance(event, TextChunk) for token in event.token_ids
        ]
        answers.append(tuple(found))
    took = time.perf_counter() - start
    total = sum(map(len, answers))
    used = stats.drafts_used - before[2]
    return Measured(
        tokens_per_s=total / took,
        tau=total / (stats.times.steps - before[0]),
        idle=(stats.times.seconds.get("draft_wait", 0.0) - before[1]) / took,
        ahead=(stats.drafts_ahead - before[3]) / used if used else 0.0,
        answers=tuple(answers),
    )


async def run(arguments: argparse.Namespace) -> dict[str, list[Measured]]:
    """Measure plain decoding and each value of --ahead by turns."""
    settings = load()
    model = resolve(settings.model, settings.cache_dir)
    results: dict[str, list[Measured]] = {}
    async with AsyncExitStack() as stack:
        running = {
            ahead: await stack.enter_async_context(service(model, arguments.delay_ms / 1e3, ahead))
            for ahead in arguments.ahead
        }
        for _ in track(range(arguments.repeats), "Measuring", console=stderr()):
            for ahead, (router, stats) in running.items():
                for strategy in (PLAIN, arguments.strategy):
                    if strategy != PLAIN or ahead == arguments.ahead[0]:
                        name = PLAIN if strategy == PLAIN else f"{strategy}, draft_ahead {ahead}"
                        results.setdefault(name, []).append(await measure(router, stats, strategy, arguments.tokens))
    return results


def show(results: dict[str, list[Measured]], delay_ms: float) -> None:
    """Print a table of medians."""
    table = Table(title=f"drafter {delay_ms:g} ms away, each way", title_justify="left")
    for column in ("", "tok/s", "tokens per pass", "idle", "ahead", "tokens equal"):
        table.add_column(column, justify="left" if not column else "right")
    plain = results[PLAIN][0].answers
    for name, several in results.items():
        middle = {
            field: statistics.median(getattr(one, field) for one in several)
            for field in ("tokens_per_s", "tau", "idle", "ahead")
        }
        same = "yes" if all(one.answers == plain for one in several) else "NO"
        table.add_row(
            name,
            f"{middle['tokens_per_s']:.1f}",
            f"{middle['tau']:.2f}",
            f"{middle['idle']:.1%}",
            f"{middle['ahead']:.0%}",
            same,
        )
    stdout().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=10.0, help="each way")
    parser.add_argument("--ahead", type=lambda text: [int(part) for part in text.split(",")], default=[0, 4])
    parser.add_argument("--strategy", default="blend")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    show(asyncio.run(run(arguments)), arguments.delay_ms)


if __name__ == "__main__":
    main()
