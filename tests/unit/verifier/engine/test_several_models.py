"""Several trained sources for one request: each drafts while it pays for what it adds to the others; on a simulated clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from services.drafter.merging.blend import BlendSession
from services.drafter.merging.calibrator import Calibrator
from services.drafter.sessions.tree_walk import TreeWalk, prior_of
from services.links.in_process import InProcessDraftLink
from services.router.drafters import TrainedDrafter
from services.router.strategies import StrategyConfig, sources_of
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.costly_sources import CostlySources, reach
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.loop import DecodingLoop
from speculation.messages import CloseSession, Draft, DraftFailure, OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.sources import blended
from speculation.tree import chain
from speculation.types import Plan, TokenTree
from tests.engine.fakes import RandomDrafter, ToyTarget, collect, origin, request, right_tree
from tests.engine.simulated import SimulatedBudget, SimulatedWorker, run
from tests.unit.drafter.test_blend import Table

PASS_S = 0.01
FIRST, SECOND = "fspad", "draft_model"
PLAN = Plan(strategy="auto", sources=("suffix", FIRST, SECOND), max_nodes=6, observe_layers=(-1,), observe_prompt=True)
ANSWERS, TOKENS = 40, 60


@dataclass
class Model:
    """A model that drafts.

    Attributes:
        slower: how much longer a pass takes while a request uses it, as a share.
        right: how many of its tokens are right after a text of so many tokens.
    """

    slower: float
    right: Callable[[int], int]
    draft_s: float = 0.003


@dataclass
class World:
    """The models by source, and what each session was opened with."""

    models: dict[str, Model]
    opened: list[tuple[str, ...]] = field(default_factory=list)


class TextAndModels(RandomDrafter):
    """Models that draft one after the other, each draft joined with those before it, as the blend does."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.used: dict[str, tuple[str, ...]] = {}
        self.asked: dict[str, int] = {}

    @override
    async def open(self, message: OpenSession) -> Draft | DraftFailure | None:  # type: ignore[override]
        name = message.session_id
        self.world.opened.append(message.sources)
        self.sessions[name] = list(message.tokens)
        self.used[name] = tuple(source for source in message.sources if source in self.world.models)
        return self._text(name, message.max_nodes)

    @override
    async def step(self, message: StepReport) -> Draft | DraftFailure | None:  # type: ignore[override]
        name = message.session_id
        if name not in self.sessions:
            return DraftFailure(session_id=name, reason="unknown session", reopen=True)
        self.sessions[name] += message.committed
        return self._text(name, message.max_nodes)

    def _text(self, name: str, nodes: int) -> Draft:
        self.asked[name] = nodes
        return self._joined(name, "text", TokenTree(tokens=(), parents=(), sources=()), more=bool(self.used[name] and nodes))

    def _joined(self, name: str, group: str, tree: TokenTree, *, more: bool) -> Draft:
        tokens = self.sessions[name]
        return Draft(
            session_id=name,
            base_length=len(tokens),
            base_hash=extend_hash(EMPTY_HASH, tokens),
            tree=tree,
            group=group,
            more=more,
        )

    @override
    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        tokens, used = list(self.sessions.get(session_id, ())), self.used.get(session_id, ())
        if not self.asked.get(session_id):
            return
        spoken: dict[str, int] = {}
        for number, source in enumerate(used, 1):
            model = self.world.models[source]
            await asyncio.sleep(model.draft_s)
            if self.sessions.get(session_id) != tokens:
                return
            spoken[source] = model.right(len(tokens))
            tree = right_tree(tokens, min(max(spoken.values()), self.asked[session_id]), "")
            # The latest one first: what both name counts as its own here.
            order = sorted(spoken, key=lambda each: each != source)
            labels = [next(each for each in order if spoken[each] > node) for node in range(len(tree))]
            joined = TokenTree(tokens=tree.tokens, parents=tree.parents, sources=tuple(labels))
            yield self._joined(session_id, source, joined, more=number < len(used))

    @override
    def close(self, message: CloseSession) -> None:
        super().close(message)
        self.used.pop(message.session_id, None)


async def answered(world: World) -> tuple[list[float], DecodingLoop]:
    """Seconds of requests, one after the other, over those of plain decoding."""
    drafter, numbers = TextAndModels(world), random.Random(1)

    def pass_s() -> float:
        slower = sum(world.models[source].slower for used in drafter.used.values() for source in used)
        return PASS_S * (1 + slower) * (1 + numbers.gauss(0, 0.03))

    config = LoopConfig(draft_deadline_s=0.025, max_num_seqs=8)
    links = [origin(InProcessDraftLink(drafter))]
    loop = DecodingLoop(ToyTarget(), links, SimulatedBudget(PASS_S), config, SimulatedWorker(pass_s))
    clock, took = asyncio.get_running_loop(), []
    await loop.start()
    try:
        for number in range(ANSWERS):
            began = clock.time()
            asked = request(f"{number}", [1, 2, number % 16], PLAN, max_tokens=TOKENS, ignore_eos=True)
            answer, _, _ = await collect(loop, asked)
            assert len(answer) == TOKENS
            took.append((clock.time() - began) / (TOKENS * PASS_S))
    finally:
        await loop.stop()
    return took, loop


def at_last(world: World) -> Counter[tuple[str, ...]]:
    """The models with which each of the last requests ended."""
    return Counter(tuple(sorted(set(sources) & set(world.models))) for sources in world.opened[-ANSWERS // 2 :])


@pytest.mark.examples(2)
@pytest.mark.parametrize("names", [(FIRST, SECOND), (SECOND, FIRST)], ids=["the first", "the second"])
def test_of_two_that_bring_the_same_the_dearer_one_is_dropped(names: tuple[str, str]) -> None:
    cheap, dear = names
    world = World({cheap: Model(0.1, lambda _: 3), dear: Model(0.5, lambda _: 3)})
    took, loop = run(answered(world))
    assert at_last(world)[(cheap,)] >= 0.8 * ANSWERS / 2
    assert loop.stats.source_choices[dear]["too_costly"] > ANSWERS / 2
    # Four tokens a pass that takes a tenth longer, and a wait of 3 ms.
    assert sum(took[-10:]) / 10 < 0.45


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [(FIRST, SECOND), (SECOND, FIRST)], ids=["the first", "the second"])
def test_a_cheap_one_that_adds_nothing_to_a_dear_one_is_dropped(names: tuple[str, str]) -> None:
    cheap, dear = names
    world = World({cheap: Model(0.2, lambda _: 1), dear: Model(0.4, lambda _: 5)})
    run(answered(world))
    assert at_last(world)[(dear,)] >= 0.8 * ANSWERS / 2


def test_two_that_each_add_something_both_stay() -> None:
    halves = {FIRST: lambda length: 4 * (length // 8 % 2), SECOND: lambda length: 4 * (1 - length // 8 % 2)}
    world = World({name: Model(0.1, right) for name, right in halves.items()})
    run(answered(world))
    assert at_last(world)[tuple(sorted(halves))] >= 0.7 * ANSWERS / 2


def test_a_source_that_is_credited_with_what_others_draft_too_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(self: CostlySources, live: LiveRequest, committed: tuple[int, ...], accepted: int) -> None:
        for use in live.used.values():
            use.steps += 1
            use.drafts += 1
            use.brought.learn(accepted, len(committed) - accepted)

    monkeypatch.setattr(CostlySources, "learn_step", learn)
    with pytest.raises(AssertionError):
        test_of_two_that_bring_the_same_the_dearer_one_is_dropped((FIRST, SECOND))


def test_what_both_models_name_counts_for_neither_alone() -> None:
    used: list[tuple[str, ...]] = []

    def joint(models: tuple[str, ...]) -> Calibrator:
        used.append(models)
        return Calibrator({"t:0": 0.5} | prior_of("a") | prior_of("b"))

    blend = BlendSession({"t": Table(0, {0: [(1, "t:0")]})}, Calibrator({"t:0": 0.5}), {n: TreeWalk(n) for n in "ab"}, joint)
    alone = blend.draft(8)
    blend.take("b", chain([5, 6], "b", (0.8, 0.7)))
    of_b = blend.draft(8)
    blend.take("a", chain([5, 7], "a", (0.8, 0.7)))
    of_both = blend.draft(8)
    assert used == [("b",), ("a", "b")]
    trees = {"text": alone, "b": of_b, "a": of_both}

    def adds(model: str, *tokens: int) -> int:
        others = [tree for group, tree in trees.items() if group != model]
        return len(tokens) - reach(others, tokens, without=model)

    assert adds("a", 5) == adds("b", 5) == adds("a", 1) == adds("b", 1) == 0
    assert (adds("a", 5, 6), adds("b", 5, 6)) == (0, 1)
    assert (adds("a", 5, 7), adds("b", 5, 7)) == (1, 0)


def test_the_blend_uses_all_that_somebody_named() -> None:
    trained = {"medusa", "draft_model", "fspad"}
    assert blended(trained, named=True) == ("fspad", "draft_model", "medusa")
    assert blended(trained, named=False) == ("fspad",)
    config = StrategyConfig(
        trained=(TrainedDrafter(name="medusa", source="medusa"), TrainedDrafter(name="fspad", source="fspad"))
    )
    assert sources_of("auto", config) == ("suffix", "recycling", "fspad", "medusa")
