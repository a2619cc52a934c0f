"""One verifier and one drafter on a simulated machine: the real text sources, budget and loop, and recorded answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lab.regret.recorded_answers import RecordedAnswer
from lab.regret.recorded_target import Likeliest, LikeliestElsewhere, RecordedTarget
from lab.regret.simulated_clock import SimulatedWorker
from services.api.messages import ClientRequest, RequestedSampling
from services.drafter.config import DrafterConfig
from services.drafter.sessions.text_group import TextGroup, TextSession
from services.links.in_process import InProcessDraftLink
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.finishing import whole_pass
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.origins import Origin
from services.verifier.engine.passes import PassWork
from speculation.budget import MeasuredBudget
from speculation.columns import SentReports
from speculation.costs import CostTable, Load
from speculation.errors import Internal
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    FeatureChunk,
    ForgetTenant,
    GenerationRequest,
    OpenSession,
    Progress,
    StepReport,
)
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.sources import TEXT
from speculation.types import EMPTY_TREE, Effort, Plan, SamplingParams, TokenTree

# By how much passes of the same rows differ, as a share of their time (standard deviation).
_NOISE = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """How long things take.

    Attributes:
        pass_s: seconds of a pass with one row.
        row: what each further row adds, as a share of it.
        free_rows: so many rows cost as much as one.
        draft_s: seconds of a draft.
        slower: by how much drafting under way slows a pass, as a share, if all requests of the batch have it.
        unseen: by how much a step is longer while anybody may draft, beside what the budget measures of a pass, as a share.
    """

    pass_s: float = 0.01
    row: float = 0.12
    free_rows: int = 1
    draft_s: float = 0.0005
    slower: float = 0.0
    unseen: float = 0.0

    def costs(self) -> CostTable:
        """What a measurement at start would find."""
        rows = [2**power for power in range(11)]
        return CostTable(by_rows={each: self.seconds(each) for each in rows}, per_request=0.0, per_key=0.0)

    def seconds(self, rows: int) -> float:
        """Of a pass."""
        return self.pass_s * (1 + self.row * max(0, rows - self.free_rows))


class _TextDrafter:
    """Implements ``Drafter``: the text sources without their thread, which a simulated clock knows nothing of."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._group = TextGroup(DrafterConfig())
        self._texts: dict[str, TextSession] = {}
        # Of each session, the committed tokens: their number, and their hash.
        self._prefixes: dict[str, tuple[int, int]] = {}
        self.drafting: set[str] = set()

    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        self._prefixes[message.session_id] = len(message.tokens), extend_hash(EMPTY_HASH, message.tokens)
        self._texts[message.session_id] = self._group.open(message, message.sources)
        return await self._draft(message.session_id, message.max_nodes)

    async def step(self, message: StepReport) -> Draft | DraftFailure:
        self._prefixes[message.session_id] = message.length, message.prefix_hash
        self._texts[message.session_id].observe(message)
        return await self._draft(message.session_id, message.max_nodes)

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        none: tuple[Draft, ...] = ()
        for draft in none:
            yield draft

    def features(self, message: FeatureChunk) -> None:
        pass

    def close(self, message: CloseSession) -> None:
        if (text := self._texts.pop(message.session_id, None)) is not None:
            text.close()

    async def forget(self, message: ForgetTenant) -> None:
        self._group.forget(message.tenant)

    async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:
        (length, prefix_hash), tree = self._prefixes[session_id], EMPTY_TREE
        self.drafting.add(session_id)
        if max_nodes:
            tree = self._texts[session_id].draft(max_nodes)
            await asyncio.sleep(self._machine.draft_s)
        self.drafting.discard(session_id)
        return Draft(session_id=session_id, base_length=length, base_hash=prefix_hash, tree=tree, group=TEXT)


class _MachineWorker(SimulatedWorker):
    """Takes as long as the pass's rows and the drafting that goes on say."""

    def __init__(self, machine: Machine, drafter: _TextDrafter) -> None:
        super().__init__(lambda: self.whole_s)
        # Of a pass, and from the end of the pass before to its end.
        self.took_s = self.whole_s = 0.0
        self._machine, self._drafter, self._numbers = machine, drafter, random.Random(3)
        self.told: set[str] = set()

    @override
    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        if function is whole_pass:
            work: PassWork = arguments[1]
            busy = self._drafter.drafting | self.told
            self.told = set()
            share = sum(request.id in busy for request in work.requests) / len(work)
            # Prompts are the same for all strategies: they take no longer than a token.
            seconds = self._machine.seconds(sum(max(1, rows.logits) for rows in work.rows))
            self.took_s = seconds * (1 + self._machine.slower * share) * (1 + self._numbers.gauss(0, _NOISE))
            watched = any(rows.top_k for rows in work.part_rows)
            self.whole_s = self.took_s + (self._machine.unseen * seconds if watched else 0.0)
        return super().submit(function, *arguments, **keywords)


class _MachineBudget(MeasuredBudget):
    """Learns the simulated seconds of passes, not those that the simulation takes."""

    worker: _MachineWorker

    @override
    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        super().learn(load, self.worker.took_s, outcomes)

    @override
    def learn_prompts(self, load: Load, seconds: float) -> None:
        super().learn_prompts(load, self.worker.took_s)


class _MachineLink(InProcessDraftLink):
    worker: _MachineWorker

    @override
    def step(self, message: StepReport) -> None:
        self.worker.told.add(message.session_id)
        super().step(message)

    @override
    def steps(self, reports: SentReports) -> None:
        self.worker.told.update(reports.session_ids)
        super().steps(reports)


class SimulatedService:
    """A loop with the text sources, on one simulated machine. Its requests are one tenant's, as they would be in serving.

    Args:
        elsewhere: as for ``RecordedTarget``; None: what was likeliest after the same tokens elsewhere in the recordings.
    """

    def __init__(
        self, machine: Machine, answers: Sequence[RecordedAnswer], *, vocab_size: int, elsewhere: Likeliest | None = None
    ) -> None:
        drafter = _TextDrafter(machine)
        link = _MachineLink(drafter)
        worker = link.worker = _MachineWorker(machine, drafter)
        budget = _MachineBudget(machine.costs(), max_nodes=32)
        budget.worker = worker
        config = LoopConfig(draft_deadline_s=0.025, max_num_seqs=64, max_batched_tokens=4096)
        target = RecordedTarget(answers, elsewhere or LikeliestElsewhere(answers), vocab_size=vocab_size)
        origin = Origin(name="the drafter", link=link, trusted=True, sources=None)
        self.loop = DecodingLoop(target, [origin], budget, config, worker)
        self._number = 0

    async def seconds(self, answers: Sequence[RecordedAnswer], strategy: str, effort: Effort | None = None) -> float:
        """How long these answers take, all asked for at once, until the last one ends; see ``times``."""
        return max(await self.times(answers, strategy, effort))

    async def times(self, answers: Sequence[RecordedAnswer], strategy: str, effort: Effort | None = None) -> list[float]:
        """Seconds until each of these answers ends, all asked for at once.

        Raises:
            Internal: an answer is not the recorded one.
        """
        plan = plan_of(strategy, effort)
        self._number += 1
        named = [(each, f"{self._number}-{index}") for index, each in enumerate(answers)]
        return await asyncio.gather(*(self._answer(each, plan, name) for each, name in named))

    async def _answer(self, recorded: RecordedAnswer, plan: Plan, name: str) -> float:
        clock = asyncio.get_running_loop()
        began = clock.time()
        sampling = SamplingParams(temperature=recorded.temperature, seed=1, max_tokens=len(recorded.output_ids))
        request = GenerationRequest(request_id=name, prompt=recorded.prompt_ids, sampling=sampling, plan=plan, tenant="")
        events = [event async for event in self.loop.generate(request)]
        said = [token for event in events if isinstance(event, Progress) for token in event.token_ids]
        if said != list(recorded.output_ids):
            raise Internal(f"{plan.strategy} changed a recorded answer")
        return clock.time() - began


def plan_of(strategy: str, effort: Effort | None = None) -> Plan:
    """The router's, without an index or a model."""
    asked = ClientRequest(input=(), sampling=RequestedSampling(), strategy=strategy, effort=effort)
    return make_plan(asked, StrategyConfig())
