"""What goes wrong inside the loop: passes that hang, a request that cannot be planned, drafters that lie."""

from __future__ import annotations

import asyncio
import threading

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine import pass_queue
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.loop import DecodingLoop
from speculation.budget import FixedBudget
from speculation.errors import Internal, InvalidArgument, ResourceExhausted, TargetLost, Unavailable
from speculation.messages import Draft, DraftFailure, OpenSession
from speculation.tree import chain
from speculation.types import Plan
from tests.engine.fakes import PLAIN, RandomDrafter, ToyTarget, collect, decoding, origin, request
from tests.running.patience import PATIENCE_S, until
from tests.running.refusals import refuses

FLOOR_S = 0.75


class HangingTarget(ToyTarget):
    """Hangs in the next pass until it is let go, when told to."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__(depth=depth)
        self.hang_in = ""
        self.let_go = threading.Event()

    def _hang(self, where: str) -> None:
        if self.hang_in == where:
            self.let_go.wait(30)

    @override
    def begin(self, batch):  # type: ignore[no-untyped-def]
        super().begin(batch)
        self._hang("begin")

    @override
    def finish(self):  # type: ignore[no-untyped-def]
        self._hang("finish")
        return super().finish()


@pytest.mark.examples(6)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["begin", "finish"])
async def test_a_pass_that_hangs_is_noticed_and_may_come_back(where: str, depth: int) -> None:
    target = HangingTarget(depth)
    link = InProcessDraftLink(RandomDrafter())
    async with decoding(target, link, pass_deadline_s=FLOOR_S, max_num_seqs=2) as loop:
        assert len((await collect(loop, request("before", [1], max_tokens=20, ignore_eos=True)))[0]) == 20
        target.hang_in = where
        asked = [asyncio.create_task(collect(loop, request(name, [1, 2], max_tokens=50, ignore_eos=True))) for name in "abc"]
        for ended in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(ended, Unavailable), "live or waiting, another verifier can answer it"
        assert loop.alive
        assert not loop.healthy
        with pytest.raises(Unavailable):
            await collect(loop, request("late", [1]))
        await until(lambda: not loop.alive)
        target.hang_in = ""
        target.let_go.set()
        # The passes behind it come back as well, and then nothing is kept of what has ended.
        await until(lambda: loop.healthy and not target.kept)
        # The very same request may come again.
        assert len((await collect(loop, request("a", [1, 2], max_tokens=50, ignore_eos=True)))[0]) == 50
        assert loop.running == loop.waiting == 0


async def test_health_hears_of_an_overdue_pass_long_before_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_queue, "_OVERDUE_S", 0.1)
    monkeypatch.setattr(pass_queue, "_TIMES_OVERDUE", 0.0)
    target = HangingTarget(1)
    async with decoding(target, pass_deadline_s=600.0) as loop:
        target.hang_in = "finish"
        asked = asyncio.create_task(collect(loop, request("slow", [1, 2], PLAIN, max_tokens=5, ignore_eos=True)))
        await until(lambda: not loop.healthy)
        assert loop.alive
        # Nothing has failed: the pass may come back, and requests are still taken.
        later = asyncio.create_task(collect(loop, request("later", [1, 2], PLAIN, max_tokens=5, ignore_eos=True)))
        target.hang_in = ""
        target.let_go.set()
        answers = [(await each)[0] for each in (asked, later)]
        assert answers[0] == answers[1]
        await until(lambda: loop.healthy)


async def test_a_pass_that_hangs_and_is_lost_is_built_anew() -> None:
    class Lost(HangingTarget):
        @override
        def finish(self):  # type: ignore[no-untyped-def]
            if self.hang_in:
                self.let_go.wait(30)
                raise TargetLost("planted loss")
            return super().finish()

    target = Lost()
    async with decoding(target, pass_deadline_s=FLOOR_S) as loop:
        target.hang_in = "finish"
        with pytest.raises(Unavailable):
            await collect(loop, request("a", [1, 2], max_tokens=50))
        target.hang_in = ""
        target.let_go.set()
        await until(lambda: loop.healthy)
        assert target.recovered == 1
        assert len((await collect(loop, request("a", [1, 2], max_tokens=50, ignore_eos=True)))[0]) == 50


async def test_a_part_that_is_lost_while_nothing_is_asked_is_replaced() -> None:
    class Silent(HangingTarget):
        @override
        def beat(self) -> None:
            super().beat()
            if self.hang_in == "beat":
                self.let_go.wait(30)
                raise TargetLost("planted silence")

    target = Silent(depth=2)
    async with decoding(target, pass_deadline_s=FLOOR_S, idle_beat_s=0.01) as loop:
        await until(lambda: target.beats > 2)
        assert loop.healthy
        target.hang_in = "beat"
        await until(lambda: not loop.healthy)
        target.hang_in = ""
        target.let_go.set()
        await until(lambda: target.recovered == 1 and loop.healthy)
        assert len((await collect(loop, request("a", [1, 2], max_tokens=50, ignore_eos=True)))[0]) == 50


async def test_a_rank_that_is_lost_while_nothing_is_asked_is_replaced() -> None:
    """Ranks of a single stage: one pass at a time, in several processes."""

    class Silent(ToyTarget):
        @override
        def beat(self) -> None:
            super().beat()
            if not self.recovered:
                raise TargetLost("planted silence")

    target = Silent()
    target.processes = 2
    async with decoding(target, idle_beat_s=0.01) as loop:
        await until(lambda: target.recovered == 1 and target.beats > 2)
        assert loop.healthy
        assert len((await collect(loop, request("a", [1, 2], max_tokens=50, ignore_eos=True)))[0]) == 50


async def test_a_target_of_one_process_is_not_asked() -> None:
    target = ToyTarget()
    async with decoding(target, idle_beat_s=0.001) as loop:
        await asyncio.sleep(0.05)
        await collect(loop, request("a", [1, 2], max_tokens=5, ignore_eos=True))
        assert not target.beats


async def test_a_target_that_is_changed_for_long_does_not_hang() -> None:
    """What asks idle processes whether they are there would wait behind it."""
    target, go_on = ToyTarget(depth=2), threading.Event()
    async with decoding(target, pass_deadline_s=0.05, idle_beat_s=0.01) as loop:
        await loop.pause.begin(restart=False, within_s=PATIENCE_S)
        changing = asyncio.create_task(loop.change(lambda: assert_(go_on.wait(PATIENCE_S))))
        waiting = asyncio.create_task(collect(loop, request("a", [1, 2], max_tokens=50, ignore_eos=True)))
        await asyncio.sleep(0.3)
        assert loop.healthy and not waiting.done()
        go_on.set()
        await changing
        beats = target.beats
        await until(lambda: target.beats > beats)
        loop.pause.end()
        assert len((await waiting)[0]) == 50


def assert_(held: bool) -> None:
    assert held


async def test_a_target_that_is_lost_while_it_is_changed_is_rebuilt_before_the_next_pass() -> None:
    def losing() -> None:
        raise TargetLost("planted loss")

    target = ToyTarget()
    async with decoding(target) as loop:
        await loop.pause.begin(restart=False, within_s=PATIENCE_S)
        waiting = asyncio.create_task(collect(loop, request("a", [1, 2], max_tokens=50, ignore_eos=True)))
        await loop.change(losing)
        await until(lambda: target.recovered == 1 and loop.healthy)
        loop.pause.end()
        assert len((await waiting)[0]) == 50
        assert target.recovered == 1


async def test_stopping_does_not_wait_for_a_pass_that_hangs() -> None:
    target = HangingTarget()
    target.hang_in = "finish"
    async with decoding(target, pass_deadline_s=FLOOR_S) as loop:
        with pytest.raises(Unavailable):
            await collect(loop, request("a", [1, 2], max_tokens=50))
        async with asyncio.timeout(PATIENCE_S):
            await loop.stop()
    target.let_go.set()


async def test_who_waits_for_too_long_is_refused_while_the_target_is_rebuilt() -> None:
    class SlowlyRebuilt(HangingTarget):
        @override
        def recover(self) -> None:
            self._hang("recover")
            super().recover()

    target = SlowlyRebuilt()
    target.lose_next, target.hang_in = True, "recover"
    async with decoding(target, max_wait_s=0.1) as loop:
        with pytest.raises(Unavailable):
            await collect(loop, request("lost", [1], max_tokens=3))
        with pytest.raises(ResourceExhausted, match="max_wait_s"):
            await collect(loop, request("late", [1], max_tokens=3))
        assert not target.recovered
        target.let_go.set()
        await until(lambda: loop.healthy)
        assert (await collect(loop, request("next", [1], max_tokens=3)))[0]


async def test_a_slow_target_does_not_hang() -> None:
    """What passes take is what a hanging one is measured by."""
    target = ToyTarget()
    target.delay_s = 0.05
    async with decoding(target, pass_deadline_s=0.2) as loop:
        await collect(loop, request("a", [1, 2], max_tokens=5, ignore_eos=True))
        target.delay_s = 0.4
        tokens, _, _ = await collect(loop, request("b", [1, 2], max_tokens=3, ignore_eos=True))
        assert len(tokens) == 3
        assert loop.healthy


async def with_one_cursed(loop: DecodingLoop) -> None:
    """The request called ``cursed`` fails, the one beside it does not."""
    good = asyncio.create_task(collect(loop, request("good", [1], max_tokens=50, ignore_eos=True)))
    await until(lambda: loop.running)
    with pytest.raises(Internal, match="log"):
        await collect(loop, request("cursed", [1], max_tokens=50, ignore_eos=True))
    assert len((await good)[0]) == 50


async def test_what_cannot_be_planned_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LiveRequest.take_tree

    def cursed(live: LiveRequest, probabilities):  # type: ignore[no-untyped-def]
        if live.id == "cursed":
            raise RuntimeError("planted failure")
        return plan(live, probabilities)

    monkeypatch.setattr(LiveRequest, "take_tree", cursed)
    target = ToyTarget()
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        await with_one_cursed(loop)
        assert not target.kept


async def test_what_cannot_be_committed_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LiveRequest.commit

    def cursed(live: LiveRequest, tokens: tuple[int, ...]) -> None:
        if live.id == "cursed":
            raise RuntimeError("planted failure")
        commit(live, tokens)

    monkeypatch.setattr(LiveRequest, "commit", cursed)
    target = ToyTarget()
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        await with_one_cursed(loop)
        assert not target.kept


async def test_what_cannot_grow_fails_alone() -> None:
    class Cramped(ToyTarget):
        @override
        def grow(self, request_id: str, rows: int) -> int:
            if request_id == "cursed":
                raise RuntimeError("planted failure")
            return super().grow(request_id, rows)

    target = Cramped()
    async with decoding(target, InProcessDraftLink(RandomDrafter())) as loop:
        await with_one_cursed(loop)
        assert not target.kept


@pytest.mark.parametrize("method", ["choose", "seconds"])
async def test_a_budget_that_fails_costs_speed_alone(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("planted failure")

    budget = FixedBudget(max_nodes=6)
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood="good")), budget=budget) as loop:
        monkeypatch.setattr(FixedBudget, method, broken)
        tokens, _, _ = await collect(loop, request("a", [1, 2], max_tokens=20, ignore_eos=True))
        assert len(tokens) == 20


async def test_nodes_of_sources_that_the_plan_does_not_have_are_refused() -> None:
    """What is learnt of sources, and counted by them, must not grow with names that a drafter makes up."""

    class Inventive(RandomDrafter):
        count = 0

        @override
        async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:
            draft = await super()._draft(session_id, max_nodes)
            assert isinstance(draft, Draft)
            self.count += 1
            tree = chain([1, 2], f"name{self.count}")
            return Draft(session_id=session_id, base_length=draft.base_length, base_hash=draft.base_hash, tree=tree)

    async with decoding(ToyTarget(), InProcessDraftLink(Inventive())) as loop:
        await collect(loop, request("r", [1, 2], max_tokens=20, ignore_eos=True))
        assert loop.stats.drafts_malformed > 0
        assert loop.stats.nodes_by_source == {}


async def test_rejection_is_refused_where_a_drafter_is_not_trusted() -> None:
    plan = Plan(strategy="test", sources=("test",), max_nodes=6, acceptance="rejection")
    doubtful = origin(InProcessDraftLink(RandomDrafter()), "a stranger", trusted=False)
    elsewhere = origin(InProcessDraftLink(RandomDrafter()), "another", trusted=False, sources=["other"])
    trusted = origin(InProcessDraftLink(RandomDrafter()), "ours")
    async with decoding(ToyTarget(), doubtful, trusted) as loop:
        with refuses(
            InvalidArgument, field="speculation.acceptance", value="rejection", allowed="walk: a stranger is not trusted"
        ) as caught:
            await collect(loop, request("r", [1, 2], plan, max_tokens=5))
        assert caught.value.field == "speculation.acceptance"
        await collect(loop, request("r", [1, 2], max_tokens=5))
        await collect(loop, request("p", [1, 2], PLAIN, max_tokens=5))
    async with decoding(ToyTarget(), elsewhere, trusted) as loop:
        await collect(loop, request("r", [1, 2], plan, max_tokens=5))


async def test_each_origin_drafts_with_its_own_sources() -> None:
    opened: dict[str, tuple[str, ...]] = {}

    class Noting(RandomDrafter):
        def __init__(self, name: str) -> None:
            super().__init__(mood="good")
            self.name = name

        @override
        async def open(self, message: OpenSession) -> Draft | DraftFailure:
            opened[self.name] = message.sources
            return await super().open(message)

    origins = [
        origin(InProcessDraftLink(Noting("near")), "near", sources=["a", "b"]),
        origin(InProcessDraftLink(Noting("far")), "far", sources=["b", "c"]),
        origin(InProcessDraftLink(Noting("idle")), "idle", sources=["d"]),
    ]
    plan = Plan(strategy="test", sources=("a", "b", "c"), max_nodes=6)
    async with decoding(ToyTarget(), *origins) as loop:
        await collect(loop, request("r", [1, 2], plan, max_tokens=30, ignore_eos=True))
    assert opened == {"near": ("a", "b"), "far": ("b", "c")}


async def test_what_is_asked_for_in_a_step_that_leaves_nothing_to_do_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wakes the loop once more: its only reader reads no further."""
    pauses: list[asyncio.Task[None]] = []

    async def meanwhile() -> bool:
        if pauses:
            return await begin_pass()
        pauses.append(asyncio.create_task(loop.pause.begin(restart=False, within_s=2.0)))
        await asyncio.sleep(0)
        for running in tuple(loop._requests.running.values()):
            loop._fail(running, RuntimeError("planted failure"), "its pass could not be planned")
        return False

    async with decoding(ToyTarget()) as loop:
        begin_pass = loop._begin_pass
        events = loop.generate(request("a", [1, 2], PLAIN, max_tokens=500, ignore_eos=True))
        await anext(events)
        monkeypatch.setattr(loop, "_begin_pass", meanwhile)
        await until(lambda: bool(pauses))
        await pauses[0]
        loop.pause.end()
        with pytest.raises(Internal):
            _ = [event async for event in events]
