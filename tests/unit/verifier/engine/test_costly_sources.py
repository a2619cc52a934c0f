"""Sources that may cost more than they bring: when they are tried, kept and left out; on a simulated clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.costly_sources import Record, costly, reach
from services.verifier.engine.deciding.source_use import Brought, Use
from services.verifier.engine.loop import DecodingLoop
from speculation.messages import CloseSession, Draft, DraftFailure, FeatureChunk, GenerationRequest, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.types import EMPTY_TREE, Plan, TokenTree
from tests.engine.fakes import RandomDrafter, ToyTarget, collect, origin, request, right_tree
from tests.engine.simulated import SimulatedBudget, SimulatedWorker, run

PASS_S = 0.01
MODEL = "fspad"
KIND = (False, 2, frozenset[str](), "")
BOTH = Plan(
    strategy="auto", sources=("suffix", MODEL), max_nodes=6, observe_top_k=8, observe_layers=(-1,), observe_prompt=True
)
ALONE = Plan(strategy=MODEL, sources=(MODEL,), max_nodes=6, observe_layers=(-1,), observe_prompt=True)


# --- one source's record --------------------------------------------------------------------------------------------


def taught(record: Record, *, share: float, slower: float, requests: int = 1, steps: int = 64) -> None:
    """Teach a record by requests with the source, and others without it."""
    numbers = random.Random(3)
    for units in (requests, 0):
        for _ in range(steps):
            seconds = PASS_S * (1 + slower * units + numbers.gauss(0, 0.03))
            record.cost.learn(requests=requests, units=units, seconds=seconds, pass_s=PASS_S)
    record.ended(Use(trial=False, brought=Brought(share * steps, steps)), KIND)


def decisions(record: Record, count: int, requests: int = 1, now: float = 1.0) -> list[bool]:
    made = []
    for _ in range(count):
        use = record.decide(KIND, requests, now, may_try=True)
        made.append(use is not None)
    return made


def test_it_is_tried_first_and_hopeless_trials_become_rare() -> None:
    record = Record()
    assert decisions(record, 1) == [True]
    taught(record, share=0.1, slower=0.5)
    tried = [number for number, used in enumerate(decisions(record, 1000)) if used]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert tried[0] == 15
    assert gaps == [32, 64, 128, 256, 256]


def test_it_is_tried_again_after_an_hour_and_at_another_load() -> None:
    record = Record()
    assert decisions(record, 1) == [True]
    taught(record, share=0.1, slower=0.5)
    assert decisions(record, 2, now=3000.0) == [False, False]
    assert decisions(record, 2, now=4000.0) == [True, False]
    assert decisions(record, 3, requests=8, now=4000.0).count(True) == 1


def test_what_pays_is_used_and_left_out_now_and_then() -> None:
    record = Record()
    assert decisions(record, 1) == [True]
    taught(record, share=1.0, slower=0.2)
    made = decisions(record, 320)
    assert 8 <= made.count(False) <= 10
    assert record.speed(1.0, 1) == pytest.approx(2 / 1.2, rel=0.1)


def test_what_slows_eight_requests_must_bring_more() -> None:
    record = Record()
    taught(record, share=0.5, slower=0.1, requests=8)
    # One request's half token more is a sixteenth of the tokens of eight.
    assert record.speed(0.5, 8) < 1.0
    assert record.speed(1.0, 8) > 1.0


def test_only_one_trial_at_a_time() -> None:
    record = Record()
    assert record.decide(KIND, 4, 1.0, may_try=True) is not None
    record.trials = 1
    assert decisions(record, 40, requests=4) == [False] * 40


def test_tokens_beyond_the_other_drafts() -> None:
    tree = TokenTree(tokens=(1, 2, 3), parents=(-1, 0, 1), sources=("a", "b", "a"))
    other = TokenTree(tokens=(1, 2), parents=(-1, 0), sources=("c", "c"))
    assert reach([tree], (1, 2, 3), without="b") == 1
    # What stands behind a token of one source is there without it, if another source drafts that token, too.
    assert reach([other, tree], (1, 2, 3), without="b") == 3 == reach([tree, other], (1, 2, 3, 4), without="b")
    assert reach([tree, other], (1, 2, 3), without="a") == 2
    assert reach([tree], (1, 2, 3), without="a") == 0
    assert reach([EMPTY_TREE], (1, 2), without="a") == 0 == reach([], (1,), without="a")


def test_which_sources_are_costly() -> None:
    sources = ("suffix", "recycling", "retrieval", "semantic", MODEL)
    assert costly(Plan(strategy="blend", sources=sources, max_nodes=8)) == (MODEL,)
    assert costly(Plan(strategy="auto", sources=sources, max_nodes=8)) == ("retrieval", "semantic", MODEL)
    assert costly(Plan(strategy="auto", sources=sources, max_nodes=0)) == ()


# --- with the loop, on a simulated clock ----------------------------------------------------------------------------


@dataclass
class World:
    """How fast things are, and what drafts bring.

    Attributes:
        slower: how much longer a pass takes while a session has a model, as a share, for each request of the batch.
        draft_s: seconds of a model's draft.
        right: tokens of a model's draft that are right; ``text``: of the text sources' draft.
        model: the source that is the model.
        misled: with this adapter, whatever the model drafts is wrong.
    """

    slower: float
    draft_s: float = 0.004
    right: int = 3
    text: int = 0
    model: str = MODEL
    misled: str = ""
    opened: list[tuple[str, ...]] = field(default_factory=list)
    features: int = 0
    drafts: int = 0


class TextAndModel(RandomDrafter):
    """Text sources that draft at once, and a model that drafts later and on the target's cores."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.models: set[str] = set()
        self.misled: set[str] = set()
        self.asked: dict[str, int] = {}

    @override
    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:  # type: ignore[override]
        self.world.opened.append(message.sources)
        self.sessions[message.session_id] = list(message.tokens)
        self.sources[message.session_id] = message.sources[0]
        self.models.discard(message.session_id)
        if message.adapter and message.adapter == self.world.misled:
            self.misled.add(message.session_id)
        if self.world.model in message.sources:
            self.models.add(message.session_id)
        return self._text(message.session_id, message.max_nodes)

    @override
    async def step(self, message: StepReport) -> Draft | DraftFailure | None:  # type: ignore[override]
        if message.session_id not in self.sessions:
            return DraftFailure(session_id=message.session_id, reason="unknown session", reopen=True)
        self.sessions[message.session_id] += message.committed
        return self._text(message.session_id, message.max_nodes)

    def _text(self, name: str, nodes: int) -> Draft | None:
        self.asked[name] = nodes
        if self.sources[name] == self.world.model:
            return None
        return self._made(name, "suffix", "text", min(self.world.text, nodes), more=name in self.models and nodes > 0)

    def _made(self, name: str, source: str, group: str, right: int, *, more: bool = False) -> Draft:
        tokens = self.sessions[name]
        return Draft(
            session_id=name,
            base_length=len(tokens),
            base_hash=extend_hash(EMPTY_HASH, tokens),
            tree=right_tree(tokens, right, source),
            group=group,
            more=more,
        )

    @override
    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        if session_id in self.models and self.asked.get(session_id):
            self.world.drafts += 1
            nodes, length = self.asked[session_id], len(self.sessions[session_id])
            await asyncio.sleep(self.world.draft_s)
            if len(self.sessions.get(session_id, ())) == length:
                right = 0 if session_id in self.misled else min(self.world.right, nodes)
                yield self._made(session_id, self.world.model, self.world.model, right)

    @override
    def features(self, message: FeatureChunk) -> None:
        self.world.features += 1

    @override
    def close(self, message: CloseSession) -> None:
        super().close(message)
        self.models.discard(message.session_id)


class Service:
    """A loop with one drafter, in a simulated world."""

    def __init__(self, world: World, target: ToyTarget | None = None) -> None:
        self.world = world
        drafter, numbers = TextAndModel(world), random.Random(1)

        def pass_s() -> float:
            live = max(1, len(loop._requests.running))
            share = min(1.0, len(drafter.models) / live)
            return PASS_S * (1 + world.slower * share) * (1 + numbers.gauss(0, 0.05))

        config = LoopConfig(draft_deadline_s=0.025, max_num_seqs=64)
        links = [origin(InProcessDraftLink(drafter))]
        self.loop = loop = DecodingLoop(
            target or ToyTarget(), links, SimulatedBudget(PASS_S), config, SimulatedWorker(pass_s)
        )
        self.number = 0

    async def took(
        self, count: int, plan: Plan = BOTH, tokens: int = 60, at_once: int = 1, adapter: str = ""
    ) -> list[float]:
        """Seconds of rounds of requests, over those of plain decoding."""
        clock, found = asyncio.get_running_loop(), []
        for _ in range(count):
            began, self.number = clock.time(), self.number + 1
            wanted = [replace(self._request(each, plan, tokens), adapter=adapter) for each in range(at_once)]
            answers = await asyncio.gather(*(collect(self.loop, one) for one in wanted))
            assert all(len(answer) == tokens for answer, _, _ in answers)
            found.append((clock.time() - began) / (tokens * PASS_S))
        return found

    def _request(self, each: int, plan: Plan, tokens: int) -> GenerationRequest:
        return request(f"{self.number}-{each}", [1, 2, each % 16], plan, max_tokens=tokens, ignore_eos=True)


async def after(world: World, count: int, **how: object) -> tuple[list[float], World]:
    service = Service(world)
    await service.loop.start()
    try:
        return await service.took(count, **how), world  # type: ignore[arg-type]
    finally:
        await service.loop.stop()


@pytest.mark.parametrize(("right", "ends"), [(0, "too_costly"), (3, "pays")])
def test_decisions_are_counted(right: int, ends: str) -> None:
    async def main() -> tuple[Service, World]:
        world = World(slower=0.3, draft_s=0.004, right=right)
        service = Service(world)
        await service.loop.start()
        await service.took(12)
        await service.loop.stop()
        return service, world

    service, world = run(main())
    choices = service.loop.stats.source_choices
    used = sum(MODEL in sources for sources in world.opened)
    assert set(choices) == {MODEL}
    reasons = Counter(choices[MODEL])
    assert reasons["trial"] + reasons["pays"] == used
    assert reasons["too_costly"] == 12 - used
    assert reasons["given_up"] == (right == 0)
    assert reasons[ends] > 0
    # A replica's numbers are told as JSON.
    assert json.loads(json.dumps(asdict(service.loop.stats)))["source_choices"] == choices


def test_an_adapter_that_a_model_never_drafts_right_for_spoils_no_other() -> None:
    async def main() -> Counter[str]:
        world, used = World(slower=0.3, right=2, misled="other"), Counter[str]()
        service = Service(world)
        await service.loop.start()
        for _ in range(24):
            for count, adapter in ((5, "other"), (2, "")):
                before = len(world.opened)
                await service.took(count, adapter=adapter, tokens=30)
                used[adapter] += sum(MODEL in sources for sources in world.opened[before:])
        await service.loop.stop()
        return used

    used = run(main())
    # Of 48 and of 120. It was first tried with the adapter, and given up.
    assert used[""] > 30 and used["other"] < 20


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


@pytest.mark.examples(6)
@pytest.mark.parametrize("plan", [BOTH, ALONE], ids=["beside text", "alone"])
@pytest.mark.parametrize(("draft_s", "right"), [(0.03, 3), (0.004, 0), (0.2, 3)])
def test_a_model_that_does_not_pay_costs_nothing(plan: Plan, draft_s: float, right: int) -> None:
    found, world = run(after(World(slower=0.6, draft_s=draft_s, right=right), 40, plan=plan))
    assert mean(found) <= 1.03
    assert mean(found[1:]) <= 1.02
    # The first request, one of the next sixteen, one of the next 32.
    assert 2 <= sum(MODEL in sources for sources in world.opened) <= 3
