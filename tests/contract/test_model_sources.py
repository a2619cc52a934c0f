"""A model source over both draft links: batches, groups, hidden states, and text that waits for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import Draft, FeatureChunk, ForgetTenant, Forgotten
from speculation.types import TokenTree
from tests.contract.test_draft_links import TEXT, in_process, opening, over_grpc, report
from tests.drafters.drafter_sessions import row, rows
from tests.drafters.model_source import NAME, ModelDouble, register
from tests.running.patience import PATIENCE_S, until

SOURCES = ("prompt_lookup", NAME)


@pytest.mark.parametrize("connect", [in_process, over_grpc], ids=["in_process", "grpc"])
async def test_a_model_drafts_for_sixteen_sessions_at_once(
    connect: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    double = register(monkeypatch, ModelDouble(answer=(7, 8)))
    names = [f"s{n:02}" for n in range(16)]
    async with connect(DrafterService(DrafterConfig())) as (link, recorder), asyncio.timeout(PATIENCE_S):  # type: ignore[attr-defined]

        async def replies(count: int) -> list[Draft]:
            return [await recorder.replies.get() for _ in range(count)]

        for name in names:
            link.open(opening(name, TEXT, SOURCES))
            link.features(FeatureChunk(session_id=name, features=rows(0, 6)))
        opened = await replies(32)
        assert sorted((draft.session_id, draft.group) for draft in opened) == sorted(
            (name, group) for name in names for group in ("text", NAME)
        )
        # While it is at work on one, the others' text goes on; then all that wait are drafted together.
        double.batches.clear()
        double.stuck.set()
        # Room for both: the text goes on as look-up says, so it has come to count for more than the model.
        link.step(replace(report(names[0], TEXT, (4,)), max_nodes=8))
        assert (await recorder.replies.get()).group == "text"
        await until(lambda: double.batches)
        for name in names[1:]:
            link.step(replace(report(name, TEXT, (4,)), max_nodes=8))
        texts = await replies(15)
        assert [(draft.session_id, draft.group, draft.more) for draft in texts] == [
            (name, "text", True) for name in names[1:]
        ]
        double.stuck.clear()
        later = await replies(16)
        # Over gRPC a drafter knows sessions by their stream as well.
        asked = [[name.rpartition("/")[2] for name in batch] for batch in double.batches]
        assert asked == [names[:1], names[1:]]
        assert [(draft.session_id, draft.group, draft.more) for draft in later] == [(name, NAME, False) for name in names]
        assert all(NAME in draft.tree.sources for draft in later)
        # The last committed token but one has not been told of.
        assert list(double.masked.values()) == [[6]] * 16
        assert all(states == {place: row(place) for place in range(6)} for states in double.states.values())
        link.forget(ForgetTenant(tenant="", forget_id=5))
        assert await recorder.replies.get() == Forgotten(forget_id=5)
        assert double.forgotten == [""]
        assert len(double.closed) == 16


@pytest.mark.parametrize("connect", [in_process, over_grpc], ids=["in_process", "grpc"])
async def test_requests_that_only_a_model_drafts_for(
    connect: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    double = register(monkeypatch, ModelDouble(answer=(7, 8)))
    async with connect(DrafterService(DrafterConfig())) as (link, recorder), asyncio.timeout(PATIENCE_S):  # type: ignore[attr-defined]
        link.open(opening("a", TEXT, (NAME,)))
        first = await recorder.replies.get()
        assert (first.group, first.more, first.tree.tokens) == (NAME, False, (7, 8))
        double.fails_for = {""}
        link.step(report("a", TEXT, (4,)))
        # That there will be nothing is worth saying: nobody waits then.
        second = await recorder.replies.get()
        assert (second.group, second.more, len(second.tree), second.base_length) == (NAME, False, 0, len(TEXT) + 1)


@pytest.mark.parametrize("connect", [in_process, over_grpc], ids=["in_process", "grpc"])
async def test_a_model_that_could_not_draft_in_time_says_so(
    connect: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has gone on meanwhile. Unanswered, nobody would ask for another draft."""

    class Reading(ModelDouble):
        @override
        def _draft(self, wanted: DraftWanted) -> TokenTree | None:  # type: ignore[override]
            return super()._draft(wanted) if len(self.batches) > 1 else None

    double = register(monkeypatch, Reading(answer=(7, 8)))
    double.stuck.set()
    async with connect(DrafterService(DrafterConfig())) as (link, recorder), asyncio.timeout(PATIENCE_S):  # type: ignore[attr-defined]
        link.open(opening("a", TEXT, (NAME,)))
        await until(lambda: double.batches)
        link.step(report("a", TEXT, (4,)))
        await asyncio.sleep(0.05)
        double.stuck.clear()
        replies = [await recorder.replies.get() for _ in range(2)]
        assert [(each.base_length - len(TEXT), each.unready, len(each.tree)) for each in replies] == [
            (0, True, 0),
            (1, False, 2),
        ]
