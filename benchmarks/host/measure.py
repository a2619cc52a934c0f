"""Measures a step of the real decoding loop on a target that takes no time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from typing_extensions import override

from benchmarks.host.loads import HostLoad
from benchmarks.host.null_target import NullTarget, PassMark, scripted_text
from benchmarks.host.parts import Profiled
from cluster.process.starting import begin_serving, end_serving
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from services.verifier.attention.calls import MAX_NODES
from services.verifier.attention.fixed import Largest
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.native.node_choice import measured_budget
from services.verifier.engine.origins import Origin
from speculation.budget import FixedBudget, MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.errors import Internal
from speculation.messages import GenerationRequest
from speculation.sources import SOURCES, STRATEGIES
from speculation.types import Plan, SamplingParams, TokenTree

# Passes before the first measured one, once all requests decode.
_WARM_UP = 16
# Of passes on a GPU, about.
_COSTS = CostTable(by_rows={2**power: 0.01 + 1e-5 * 2**power for power in range(11)}, per_request=1e-5, per_key=1e-9)
# Where a step waits for its drafts, it waits for all of them.
_DEADLINE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """Passes that followed each other: seconds of one, on the clock and of the processors, and its tokens and nodes.

    Attributes:
        thread_s: as in ``PassMark``, of a pass.
    """

    wall_s: float
    cpu_s: float
    tokens: float
    nodes: float
    thread_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideGpu:
    """Seconds of a step in the best of all windows.

    Attributes:
        host_s: of a processor, of the target's thread: it lays passes out and launches them, makes choices and verdicts of
            their ids, and keeps rows.
        idle_s: on the clock, in which the GPU has nothing to do: these, and the loop's own, with drafts that are waited for.
    """

    host_s: float
    idle_s: float


@dataclass(kw_only=True, slots=True)
class HostCost:
    """What was found for one load.

    Attributes:
        beside: only where passes were laid out for a GPU.
        windows: all measured ones, in their order.
        phases: mean seconds of a step by phase of the loop, on the clock.
        parts: mean seconds of a step by part of the code, of the processors; measured apart, under a profiler.
        memory: resident bytes after each stretch of passes, with the number of passes; only where asked for.
    """

    load: HostLoad
    windows: list[StepWindow] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    memory: list[tuple[int, int]] = field(default_factory=list)
    beside: BesideGpu | None = None

    @property
    def best(self) -> StepWindow:
        """The window that other work on the machine has disturbed least."""
        return min(self.windows, key=lambda window: window.cpu_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AllChecked(FixedBudget):
    """Asks the measured budget which nodes are worth their rows, as serving does, and checks all of them nevertheless."""

    measured: MeasuredBudget

    @override
    def choose(self, trees: Sequence[TokenTree], load: Load, decoding: Load) -> list[TokenTree]:
        self.measured.choose(trees, load, decoding)
        return list(trees)

    @override
    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        self.measured.learn(load, seconds, outcomes)


class _Run:
    """One loop with its requests, and what its target marks."""

    def __init__(self, load: HostLoad, every: int, answer: int, pass_s: float | None = None) -> None:
        self._load, self._answer = load, answer
        self._texts: dict[str, list[int]] = {}
        self._marks: asyncio.Queue[PassMark] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()
        length = load.prompt + answer + 1
        self.target = NullTarget(
            self._texts,
            rows=load.requests * (length + load.nodes + 256),
            max_model_len=length,
            every=every,
            marked=lambda mark: _tell(event_loop, self._marks, mark),
            largest=None if pass_s is None else _largest(load, length),
            pass_s=pass_s or 0.0,
        )
        self.worker = ThreadPoolExecutor(1)
        self.drafter = DrafterService(DrafterConfig())
        origin = Origin(name="the drafter", link=InProcessDraftLink(self.drafter), trusted=True)
        config = LoopConfig(
            max_num_seqs=load.requests, max_batched_tokens=8192, draft_deadline_s=_DEADLINE_S, pass_deadline_s=600.0
        )
        origins = [origin] if load.nodes else []
        nodes = max(1, load.nodes)
        budget = _AllChecked(max_nodes=nodes, measured=measured_budget(_COSTS, max_nodes=nodes))
        self.loop = DecodingLoop(self.target, origins, budget, config, self.worker)
        self._clients: list[asyncio.Task[None]] = []
        self._decoding = 0

    async def start(self, *, again: bool) -> None:
        """Let all requests begin; ``again``: each that ends is followed by another."""
        await self.loop.start()
        self._clients = [asyncio.create_task(self._client(number, again)) for number in range(self._load.requests)]

    async def all_decode(self) -> None:
        """Wait until every request has got a token."""
        while self._decoding < self._load.requests:
            await self.mark()

    async def mark(self) -> PassMark:
        """The next mark.

        Raises:
            Internal: a request has ended.
        """
        marked = asyncio.create_task(self._marks.get())
        await asyncio.wait((marked, *self._clients), return_when=asyncio.FIRST_COMPLETED)
        if not marked.done():
            marked.cancel()
            await asyncio.gather(*(client for client in self._clients if client.done()))
            raise Internal("a request ended before its steps were measured")
        return marked.result()

    async def stop(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self.loop.stop()
        await self.drafter.stop()

    async def _client(self, number: int, again: bool) -> None:
        first, turn = True, 0
        while first or again:
            name = f"r{number}-{turn}"
            text = self._texts[name] = scripted_text(
                number + turn * self._load.requests, self._load.prompt + self._answer + 1
            )
            request = GenerationRequest(
                request_id=name,
                prompt=tuple(text[: self._load.prompt]),
                sampling=SamplingParams(max_tokens=self._answer, ignore_eos=True),
                plan=plan_of(self._load),
                # What is kept of one tenant is full soon, and must not grow from then on.
                tenant="one" if again else f"t{number}",
            )
            answer: list[int] = []
            async for event in self.loop.generate(request):
                self._decoding += first
                first = False
                answer += getattr(event, "token_ids", ())
            if answer != text[self._load.prompt : self._load.prompt + len(answer)]:
                raise Internal(f"the answer of {name} is not what the target chose")
            del self._texts[name]
            turn += 1


def _largest(load: HostLoad, length: int) -> Largest:
    return Largest(rows=load.requests * (1 + load.nodes), requests=load.requests, positions=length + MAX_NODES)


def _tell(event_loop: asyncio.AbstractEventLoop, marks: asyncio.Queue[PassMark], mark: PassMark) -> None:
    event_loop.call_soon_threadsafe(marks.put_nowait, mark)


def plan_of(load: HostLoad) -> Plan:
    """How the load's requests are sped up."""
    sources = STRATEGIES[load.strategy] if load.nodes else ()
    top_k = max((SOURCES[name].top_k for name in sources), default=0)
    return Plan(strategy=load.strategy, sources=sources, max_nodes=load.nodes, observe_top_k=top_k)


def _silent(_: str) -> None:
    """Hears nothing."""


def measure(
    load: HostLoad, *, rounds: int, steps: int, told: Callable[[str], None] = _silent, pass_s: float | None = None
) -> HostCost:
    """Measure ``rounds`` windows of ``steps`` passes each, then one more under a profiler.

    Args:
        told: hears what is going on.
        pass_s: seconds of a pass on a device that computes nothing, for whose graphs passes are laid out; None: they take
            no time.
    """
    return asyncio.run(_measure(load, rounds, steps, told, pass_s))


async def _measure(load: HostLoad, rounds: int, steps: int, told: Callable[[str], None], pass_s: float | None) -> HostCost:
    found = HostCost(load=load)
    # Every pass may commit a whole path.
    answer = (load.nodes + 1) * (rounds + 4) * max(steps, _WARM_UP) + load.requests * 4
    run = _Run(load, steps, answer, pass_s)
    told(f"{load.name}: reading the prompts")
    try:
        await run.start(again=False)
        await run.all_decode()
        await run.mark()
        begin_serving()
        before, times = await run.mark(), run.loop.stats.times
        target, first = run.target, before
        seconds, laid_out, beside = dict(times.seconds), target.layout_s, (target.early_s, target.waited_s)
        for number in range(rounds):
            told(f"{load.name}: round {number + 1} of {rounds}")
            after = await run.mark()
            found.windows.append(_window(before, after))
            before = after
        passes = before.passes - first.passes
        spent = {name: (value - seconds.get(name, 0.0)) / passes for name, value in times.seconds.items()}
        layout_s, step_s = (target.layout_s - laid_out) / passes, (before.wall_s - first.wall_s) / passes
        if pass_s is None:
            found.phases = _phases(spent, layout_s, step_s)
        else:
            early_s, waited_s = (
                (now - then) / passes for now, then in zip((target.early_s, target.waited_s), beside, strict=True)
            )
            found.phases = _phases(
                spent, layout_s, step_s, {"done while the graph runs": early_s, "wait for the graph": waited_s}
            )
            found.beside = BesideGpu(
                host_s=min(window.thread_s for window in found.windows),
                idle_s=min(window.wall_s for window in found.windows) - pass_s,
            )
        told(f"{load.name}: under a profiler")
        found.parts = await _profiled(run, found.best.cpu_s)
    finally:
        end_serving()
        await run.stop()
    return found


async def _profiled(run: _Run, step_s: float) -> dict[str, float]:
    """Seconds of a step by part of the code; a profiler slows all down, so its shares are taken of ``step_s``."""
    profiled = Profiled(run.worker)
    with profiled:
        await run.mark()
    return {name: share * step_s for name, share in profiled.shares().items()}


def _window(before: PassMark, after: PassMark) -> StepWindow:
    passes = after.passes - before.passes
    return StepWindow(
        wall_s=(after.wall_s - before.wall_s) / passes,
        cpu_s=(after.cpu_s - before.cpu_s) / passes,
        tokens=(after.tokens - before.tokens) / passes,
        thread_s=(after.thread_s - before.thread_s) / passes,
        nodes=(after.nodes - before.nodes) / passes,
    )


def _phases(
    spent: dict[str, float], layout_s: float, step_s: float, running: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The phases of a step, in their order; the last one is what none of them holds.

    Args:
        running: what there is between the launch of a graph and its end.
    """
    inner = sum(spent.get(name, 0.0) for name in ("begin", "forward", "choose", "keep"))
    phases = {
        "wait for drafts": spent.get("draft_wait", 0.0),
        "plan the pass": spent.get("schedule", 0.0),
        "lay it out": layout_s,
        **(running or {}),
        "choose and verify": spent.get("choose", 0.0),
        "keep rows": spent.get("keep", 0.0),
        "hand over to the target's thread, and to clients": spent.get("pass_and_verify", 0.0) - inner,
        "deliver and report": spent.get("deliver", 0.0),
    }
    return {**phases, "the rest": step_s - sum(phases.values())}


def soak(load: HostLoad, *, passes: int, stretches: int, told: Callable[[str], None] = _silent) -> HostCost:
    """Run ``passes`` passes with requests that end and begin, and note the memory after each of ``stretches``."""
    return asyncio.run(_soak(load, passes, stretches, told))


async def _soak(load: HostLoad, passes: int, stretches: int, told: Callable[[str], None]) -> HostCost:
    found = HostCost(load=load)
    run = _Run(load, max(1, passes // stretches), answer=256)
    try:
        await run.start(again=True)
        before = await run.mark()
        while before.passes < passes:
            after = await run.mark()
            found.windows.append(_window(before, after))
            gc.collect()
            found.memory.append((after.passes, resident_bytes()))
            told(f"{load.name}: {after.passes} of {passes} passes, {found.memory[-1][1] / 2**20:.1f} MiB")
            before = after
    finally:
        with suppress(Exception):
            await run.stop()
    return found


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(psutil.Process().memory_info().rss)
