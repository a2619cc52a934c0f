"""What a request that asks is told of its passes: what was drafted, checked, dropped and kept. On a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from typing_extensions import override

from services.links.in_process import InProcessDraftLink
from services.verifier.engine.loop import DecodingLoop
from speculation.budget import FixedBudget
from speculation.costs import Load
from speculation.messages import GenerationRequest, Progress
from speculation.tree import path_to, take
from speculation.types import Plan, TokenTree
from tests.engine.fakes import RandomDrafter, ToyTarget, request
from tests.engine.simulated import PASS_S, SlowDrafter, decoding, simulated

PLAN = Plan(strategy="test", sources=("test",), max_nodes=6)
ASKED = {"max_tokens": 40, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class KeepsFirst(FixedBudget):
    """Checks the first ``count`` nodes of each tree, and notes what was drafted."""

    count: int
    drafted: list[TokenTree] = field(default_factory=list)

    @override
    def choose(self, trees: Sequence[TokenTree], load: Load, decoding: Load) -> list[TokenTree]:
        self.drafted.extend(trees)
        return [take(tree, [*range(min(self.count, len(tree)))]) for tree in trees]


async def told(loop: DecodingLoop, wanted: GenerationRequest) -> list[Progress]:
    return [event async for event in loop.generate(wanted) if isinstance(event, Progress)]


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tree's nodes, each as the tokens that lead to it."""
    return {tuple(tree.tokens[step] for step in path_to(tree, node)) for node in range(len(tree))}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [0, 2, 6])
@pytest.mark.parametrize("mood", ["random", "good"])
@simulated
async def test_a_report_holds_what_was_drafted_and_says_what_became_of_it(mood: str, count: int, depth: int) -> None:
    budget = KeepsFirst(max_nodes=6, count=count)
    async with decoding(ToyTarget(depth=depth), InProcessDraftLink(RandomDrafter(mood=mood)), budget=budget) as loop:
        events = await told(loop, request("r", [1, 2, 3], replace(PLAN, report_passes=True), **ASKED))
    assert len(events) == len(budget.drafted) and sum(len(event.token_ids) for event in events) == 40
    for event, tree in zip(events, budget.drafted, strict=True):
        report = event.report
        assert report is not None
        assert paths(report.tree) == paths(tree)
        assert report.checked == event.num_drafted == min(count, len(tree))
        assert all(-1 <= parent < node for node, parent in enumerate(report.tree.parents))
        assert all(node < report.checked for node in report.accepted_path)
        tokens = tuple(report.tree.tokens[node] for node in report.accepted_path)
        assert tokens == event.token_ids[: len(tokens)] and len(event.token_ids) - len(tokens) in (0, 1)
        assert event.accepted_sources == tuple(report.tree.sources[node] for node in report.accepted_path)
        assert (report.seconds, report.requests) == (pytest.approx(PASS_S), 1)
    if mood == "good" and count:
        assert sum(len(event.accepted_sources) for event in events) > 10


@simulated
async def test_nobody_else_is_told_and_no_token_changes() -> None:
    async with decoding(ToyTarget(), InProcessDraftLink(RandomDrafter(mood="good"))) as loop:
        plain = await told(loop, request("r", [1, 2, 3], PLAN, **ASKED))
        asked = await told(loop, request("r", [1, 2, 3], replace(PLAN, report_passes=True), **ASKED))
    assert all(event.report is None for event in plain)
    assert [replace(event, report=None) for event in asked] == plain


@simulated
async def test_seconds_waited_for_a_draft_are_told() -> None:
    drafter = SlowDrafter(lambda: 0.002)
    async with decoding(ToyTarget(), InProcessDraftLink(drafter), draft_deadline_s=1.0) as loop:
        events = await told(loop, request("r", [1, 2, 3], replace(PLAN, report_passes=True), **ASKED))
    waits = [event.report.waited_s for event in events[2:] if event.report is not None]
    assert waits and all(wait == pytest.approx(0.002, abs=2e-4) for wait in waits)
