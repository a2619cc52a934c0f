"""Recorded answers on a simulated clock: the real text sources, the real budget and loop, and a target that says the recording."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from services.client_api import ClientRequest, RequestedSampling
from services.drafter.config import DrafterConfig
from services.drafter.text_group import TEXT, TextGroup, TextSession
from services.links.in_process import InProcessDraftLink
from services.router.strategies import StrategyConfig, make_plan
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.passes import Part, load_of, whole_pass
from speculation.budget import MeasuredBudget
from speculation.costs import CostTable, Load
from speculation.messages import Draft, DraftFailure, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import EMPTY_TREE, Plan, TokenTree
from tests.fakes import RandomDrafter, ToyTarget, collect, origin, request
from tests.simulated import SimulatedWorker

VOCAB = 512
PROMPT = 24


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How long things take.

    Attributes:
        pass_s: seconds of a pass with one row.
        row: what each further row adds, as a share of it.
        free_rows: so many rows cost as much as one.
        draft_s: seconds of a draft.
        slower: by how much drafting under way slows a pass, as a share, if all requests of the batch have it.
    """

    pass_s: float = 0.01
    row: float = 0.12
    free_rows: int = 1
    draft_s: float = 0.0005
    slower: float = 0.0

    def costs(self) -> CostTable:
        """What a measurement at start would find."""
        rows = [2**power for power in range(11)]
        return CostTable(by_rows={each: self.seconds(each) for each in rows}, per_request=0.0, per_key=0.0)

    def seconds(self, rows: int) -> float:
        """Of a pass."""
        return self.pass_s * (1 + self.row * max(0, rows - self.free_rows))


class RecordedTarget(ToyTarget):
    """Says a recording after its prompt; anything after other texts."""

    vocab_size = VOCAB
    max_model_len = 4096
    eos_token_ids = frozenset({VOCAB - 1})

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(rooms=128)
        self._texts = {tuple(text[:PROMPT]): tuple(text) for text in texts}

    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Next-token logits, [vocab], float32: the recording's token, and below it others that the last token decides."""
        logits = _after(tokens[-1]).clone()
        text = self._texts[tuple(tokens[:PROMPT])]
        if tuple(tokens) == text[: len(tokens)] and len(tokens) < len(text):
            logits[text[len(tokens)]] = 8.0
        return logits


@cache
def _after(token: int) -> torch.Tensor:
    logits, numbers = torch.zeros(VOCAB), random.Random(token)
    for rank in range(16):
        logits[numbers.randrange(VOCAB - 1)] = 4.0 - rank / 8
    return logits


class TextDrafter(RandomDrafter):
    """The drafter's text sources without its thread, which a simulated clock knows nothing of."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._group = TextGroup(DrafterConfig())
        self._texts: dict[str, TextSession] = {}
        self.drafting: set[str] = set()

    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        self.sessions[message.session_id] = list(message.tokens)
        self._texts[message.session_id] = self._group.open(message, message.sources)
        return await self._draft(message.session_id, message.max_nodes)

    async def step(self, message: StepReport) -> Draft | DraftFailure:
        self.sessions[message.session_id] += message.committed
        self._texts[message.session_id].observe(message)
        return await self._draft(message.session_id, message.max_nodes)

    async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:
        tokens, tree = tuple(self.sessions[session_id]), EMPTY_TREE
        self.drafting.add(session_id)
        if max_nodes:
            tree = self._texts[session_id].draft(max_nodes)
            await asyncio.sleep(self._machine.draft_s)
        self.drafting.discard(session_id)
        base_hash = extend_hash(EMPTY_HASH, tokens)
        return Draft(session_id=session_id, base_length=len(tokens), base_hash=base_hash, tree=tree, group=TEXT)


class _Worker(SimulatedWorker):
    """Takes as long as the pass's rows and the drafting that goes on say."""

    def __init__(self, machine: Machine, drafter: TextDrafter) -> None:
        super().__init__(lambda: self.took_s)
        self.took_s = 0.0
        self._machine, self._drafter, self._numbers = machine, drafter, random.Random(3)
        self.told: set[str] = set()

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        if function is whole_pass:
            parts: list[Part] = arguments[1]
            busy = self._drafter.drafting | self.told
            self.told = set()
            share = sum(part.session.id in busy for part in parts) / len(parts)
            seconds = self._machine.seconds(load_of(parts).rows)
            self.took_s = seconds * (1 + self._machine.slower * share) * (1 + self._numbers.gauss(0, 0.03))
        return super().submit(function, *arguments, **keywords)


class _Budget(MeasuredBudget):
    """Learns the simulated seconds of passes, not those that the simulation takes."""

    worker: _Worker

    def learn(self, load: Load, seconds: float, outcomes: Sequence[tuple[TokenTree, Sequence[int]]]) -> None:
        super().learn(load, self.worker.took_s, outcomes)

    def learn_prompts(self, load: Load, seconds: float) -> None:
        super().learn_prompts(load, self.worker.took_s)


class _Link(InProcessDraftLink):
    worker: _Worker | None = None

    def step(self, message: StepReport) -> None:
        if self.worker is not None:
            self.worker.told.add(message.session_id)
        super().step(message)


class RecordedService:
    """A loop with the text sources, on one simulated machine."""

    def __init__(self, machine: Machine, texts: Sequence[Sequence[int]]) -> None:
        drafter = TextDrafter(machine)
        link = _Link(drafter)
        worker = link.worker = _Worker(machine, drafter)
        budget = _Budget(machine.costs(), max_nodes=32)
        budget.worker = worker
        config = LoopConfig(draft_deadline_s=0.025, max_num_seqs=64, max_batched_tokens=4096)
        self.loop = DecodingLoop(RecordedTarget(texts), [origin(link)], budget, config, worker)
        self._number = 0

    async def seconds(self, texts: Sequence[Sequence[int]], strategy: str) -> float:
        """How long these answers take, all at once. They are checked."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        plan = plan_of(strategy)
        self._number += 1
        wanted = [
            request(f"{self._number}-{each}", text[:PROMPT], plan, max_tokens=len(text) - PROMPT, ignore_eos=True)
            for each, text in enumerate(texts)
        ]
        answers = await asyncio.gather(*(collect(self.loop, one) for one in wanted))
        for text, (answer, _, _) in zip(texts, answers, strict=True):
            assert answer == list(text[PROMPT:])
        return clock.time() - began


def plan_of(strategy: str) -> Plan:
    """The router's, without an index or a model."""
    asked = ClientRequest(input=(), sampling=RequestedSampling(), strategy=strategy)
    return make_plan(asked, StrategyConfig())


def recordings(seed: int) -> Mapping[str, list[int]]:
    """Texts of some 200 tokens: one new, one that repeats itself, one that changes twice, and code-like phrases."""
    numbers = random.Random(seed)

    def new(count: int) -> list[int]:
        return [numbers.randrange(VOCAB - 1) for _ in range(count)]

    passage, phrases = new(30), [new(6) for _ in range(6)]
    return {
        "new": new(PROMPT + 180),
        "repeats": [*new(PROMPT), *passage, *passage, *passage, *passage, *passage, *passage],
        "changes": [*new(PROMPT), *new(60), *passage, *passage, *passage, *new(60)],
        "phrases": [*new(PROMPT), *(token for _ in range(30) for token in numbers.choice(phrases))],
    }
