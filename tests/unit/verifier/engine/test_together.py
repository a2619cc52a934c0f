"""Ordinary requests that are drafted for are given what a pass brought them together, as each would be alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine import delivery
from services.verifier.engine.loop import DecodingLoop
from services.verifier.engine.native.library import engine_library
from services.verifier.engine.passes import Part
from services.verifier.engine.together import Together, in_turn
from speculation.columns import SentReports
from speculation.messages import DraftingCall, GenerationRequest, StepReport
from speculation.types import Plan
from tests.engine.fakes import PLAIN, VOCAB, RandomDrafter, ToyTarget, collect, request
from tests.engine.simulated import SimulatedBudget, SlowDrafter, decoding, run, simulated
from tests.unit.verifier.engine.test_singles import told

MOODS = ("good", "random", "good", "stale", "malformed")
pytestmark = pytest.mark.skipif(engine_library() is None, reason="there is no compiler")


class Recorded(InProcessDraftLink):
    """Keeps what the drafter is told, call by call."""

    def __init__(self, drafter: RandomDrafter) -> None:
        super().__init__(drafter)
        self.heard: list[DraftingCall] = []
        self.columns = 0

    @override
    def _send(self, call: DraftingCall | SentReports) -> None:
        self.columns += isinstance(call, SentReports)
        self.heard += call.alone() if isinstance(call, SentReports) else [call]
        super()._send(call)


def a_request(draw: random.Random, number: int) -> GenerationRequest:
    """Most are ordinary after their first token; the others want more of a pass."""
    sampling: dict[str, Any] = {"max_tokens": draw.randint(1, 60), "ignore_eos": draw.random() < 0.8}
    plan = Plan(strategy=draw.choice(("test", "test", "other")), sources=("test",), max_nodes=draw.choice((2, 6)))
    plan = replace(plan, observe_top_k=draw.choice((0, 3)))
    match draw.randrange(20):
        case 0:
            sampling |= {"temperature": 1.0, "seed": draw.randrange(99)}
        case 1:
            sampling["logprobs"] = 2
        case 2:
            sampling["bad_words"] = ((5,), (6, 7))
        case 3:
            plan = replace(plan, report_passes=True)
        case 4:
            plan = replace(plan, effort="paper")
        case 5:
            plan = PLAIN
        case 6:
            sampling["stop_token_ids"] = (draw.randrange(VOCAB), draw.randrange(VOCAB))
    return request(f"r{number}", [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))], plan, **sampling)


async def answers(seed: int, depth: int, *, timed: bool) -> tuple[list[object], DecodingLoop, Recorded]:
    draw = random.Random(seed)
    wanted = [a_request(draw, number) for number in range(10)]
    target = ToyTarget(depth=depth)
    mood = MOODS[seed % len(MOODS)]
    quick = SlowDrafter(lambda: draw.choice((0.0, 0.0, 0.004)), mood) if timed else RandomDrafter(seed=seed, mood=mood)
    link = Recorded(quick)
    budget = {"budget": SimulatedBudget(0.005)} if timed else {}
    # The prompts come in pieces, and the cache is too small for all answers.
    async with decoding(target, link, max_num_seqs=8, max_batched_tokens=24, **budget) as loop:
        target.rows = 400
        found = await asyncio.gather(*(collect(loop, each) for each in wanted))
        assert not target.kept
    return [(tokens, finished, [told(step) for step in steps]) for tokens, finished, steps in found], loop, link


def learnt(loop: DecodingLoop) -> list[object]:
    """What the loop knows of drafts."""
    drafting = loop._drafting
    costs = [(name, cost._slope.seconds, cost._since_quiet) for name, cost in drafting.costs._costs.items()]
    return [*[(name, each.worth) for name, each in drafting._experiences._found.items()], *costs]


def at_hand(parts: Sequence[Part]) -> list[int]:
    """How many drafts are kept for each."""
    return [len(box._kept) for part in parts for box in part.request.mailboxes.values()]


def counted(loop: DecodingLoop) -> list[object]:
    stats = loop.stats
    return [getattr(stats, name) for name in stats.__slots__ if name not in ("times", "drafting_s")]


@pytest.mark.examples(3)
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_delivered_together_is_what_each_gets_alone(
    seed: int, depth: int, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    kept: dict[bool, list[list[int]]] = {True: [], False: []}

    def in_runs(parts: Sequence[Part], *, quiet: bool) -> list[tuple[bool, list[Part]]]:
        kept[True].append(at_hand(parts))
        found = [*in_turn(parts, quiet=quiet)]
        runs.extend(len(run) for together, run in found if together)
        return found

    def one_by_one(parts: Sequence[Part], *, quiet: bool) -> list[tuple[bool, list[Part]]]:
        kept[False].append(at_hand(parts))
        return [(False, [*parts])]

    with monkeypatch.context() as patched:
        patched.setattr(delivery, "in_turn", in_runs)
        own, loop, link = run(answers(seed, depth, timed=timed))
    monkeypatch.setattr(delivery, "in_turn", one_by_one)
    alone, reference, heard = run(answers(seed, depth, timed=timed))
    assert kept[True] == kept[False]
    assert own == alone
    assert link.heard == heard.heard
    assert not heard.columns
    # Where no draft is sound, what others learn says something of each.
    assert bool(runs) == (MOODS[seed % len(MOODS)] != "malformed")
    assert bool(link.columns) == bool(runs) or timed
    assert learnt(loop) == learnt(reference)
    assert counted(loop) == counted(reference)


@simulated
async def test_a_fault_of_what_they_do_together_ends_those_requests() -> None:
    async with decoding(ToyTarget(), Recorded(RandomDrafter(mood="good"))) as loop:
        loop._delivery._together = Failing(loop)  # type: ignore[assignment]
        found = await asyncio.gather(
            *(collect(loop, request(f"r{at}", [1, 2], max_tokens=20, ignore_eos=True)) for at in range(3)),
            collect(loop, request("plain", [1, 2], PLAIN, max_tokens=20, ignore_eos=True)),
            return_exceptions=True,
        )
        assert [isinstance(each, Exception) for each in found] == [True, True, True, False]
        assert loop.running == 0


class Failing(Together):
    """Fails."""

    def __init__(self, loop: DecodingLoop) -> None:
        super().__init__(loop.stats, loop._drafting, loop._draft_wait, [])

    @override
    def deliver(self, *_: object) -> None:
        raise RuntimeError("planted")


def test_reports_are_the_same_by_columns_and_alone() -> None:
    reports = [
        StepReport(session_id=f"s{at}", committed=(at, 1), length=9, prefix_hash=at, accepted_path=(), max_nodes=at)
        for at in range(3)
    ]
    assert SentReports.of(reports).alone() == reports
