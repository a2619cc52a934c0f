"""Text sources and models draft apart: batches, delays, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.drafter.sources.catalogue import MAKERS
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import CloseSession, Draft, DraftFailure, ForgetTenant
from speculation.sources import SOURCES, SourceSpec
from speculation.types import TokenTree
from tests.drafters.drafter_sessions import BOTH, TEXT, opening, report, rest
from tests.drafters.model_source import NAME, ModelDouble, register
from tests.running.patience import PATIENCE_S, until


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> ModelDouble:
    return register(monkeypatch, ModelDouble(answer=(7, 8, 9)))


@asynccontextmanager
async def stuck(double: ModelDouble) -> AsyncIterator[None]:
    double.stuck.set()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    finally:
        double.stuck.clear()


async def test_sixteen_sessions_are_one_call(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    names = [f"s{n}" for n in range(16)]
    await asyncio.gather(*(service.open(opening(name)) for name in names))
    await asyncio.gather(*(rest(service, name) for name in names))
    double.batches.clear()
    firsts = await asyncio.gather(*(service.step(report(name, (3,))) for name in names))
    drafts = await asyncio.gather(*(rest(service, name) for name in names))
    assert double.batches == [names]
    for name, first, (later,) in zip(names, firsts, drafts, strict=True):
        assert isinstance(first, Draft)
        assert (first.group, first.more, set(first.tree.sources)) == ("text", True, {"prompt_lookup"})
        assert (later.session_id, later.group, later.more) == (name, NAME, False)
        # In one tree with the text sources' tokens.
        assert set(later.tree.sources) == {"prompt_lookup", NAME}
        named = zip(later.tree.tokens, later.tree.sources, strict=True)
        assert [token for token, source in named if source == NAME] == [7, 8, 9]
        assert (later.base_length, later.base_hash) == (first.base_length, first.base_hash)


async def test_those_that_come_while_it_drafts_are_its_next_batch(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    async with stuck(double):
        await service.open(opening("first", (NAME,)))
        await until(lambda: double.batches)
        for n in range(5):
            assert await service.open(opening(f"s{n}", (NAME,))) is None
        assert double.batches == [["first"]]
    assert [draft.group for n in range(5) for draft in await rest(service, f"s{n}")] == [NAME] * 5
    assert double.batches == [["first"], [f"s{n}" for n in range(5)]]


async def test_a_model_that_takes_long_holds_up_nobodys_text(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    async with stuck(double):
        mixed = await service.open(opening("mixed"))
        waiting = asyncio.create_task(rest(service, "mixed"))
        await until(lambda: double.batches)
        await service.open(opening("text", ("prompt_lookup",)))
        tokens = TEXT
        for n in range(50):
            drafts = [await service.step(report(name, (n,), tokens)) for name in ("text", "mixed")]
            assert all(isinstance(draft, Draft) and draft.group == "text" for draft in drafts)
            assert [draft.more for draft in drafts] == [False, True]  # type: ignore[union-attr]
            tokens += (n,)
        assert len(double.batches) == 1
        waiting.cancel()
    assert isinstance(mixed, Draft)
    # What it was at work on may still be of use; it says what it grows from.
    late, fresh = await rest(service, "mixed")
    assert (late.base_length, late.base_hash, late.group) == (mixed.base_length, mixed.base_hash, NAME)
    assert (fresh.base_length, fresh.group, fresh.more) == (len(tokens), NAME, False)
    # Of all steps that it missed, the model is asked for the last alone.
    assert double.batches == [["mixed"], ["mixed"]]


async def test_a_session_that_fails_costs_its_own_nodes(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    double.fails_for = {"s1"}
    names = ["s0", "s1", "s2"]
    for committed in ((), (3,)):
        calls = [service.step(report(name, committed)) if committed else service.open(opening(name)) for name in names]
        firsts = await asyncio.gather(*calls)
        assert all(isinstance(draft, Draft) and len(draft.tree) for draft in firsts)
        drafted = {name: [NAME in draft.tree.sources for draft in await rest(service, name)] for name in names}
        assert drafted == {"s0": [True], "s1": [False], "s2": [True]}
    # Together, then one by one; who failed alone is not asked for again.
    assert double.batches == [names, ["s0"], ["s1"], ["s2"], ["s0", "s2"]]


async def test_a_model_that_is_dead_costs_its_own_nodes(double: ModelDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(batch: object) -> list[TokenTree]:
        raise SystemExit("killed")

    service = DrafterService(DrafterConfig())
    monkeypatch.setattr(double, "draft", die)
    for name in ("a", "b"):
        first = await service.open(opening(name))
        assert isinstance(first, Draft)
        assert len(first.tree)
        assert [len(draft.tree) for draft in await rest(service, name)] == [0]
    monkeypatch.setattr("tests.drafters.model_source.make", die)
    other = DrafterService(DrafterConfig())
    assert isinstance(await other.open(opening("a")), Draft)
    assert [len(draft.tree) for draft in await rest(other, "a")] == [0]


async def test_two_models_draft_in_groups_of_their_own(double: ModelDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    second = ModelDouble(answer=(5,))
    spec = SourceSpec(name="second", kind="model")
    monkeypatch.setitem(SOURCES, "second", spec)
    monkeypatch.setitem(MAKERS, "second", "tests.unit.drafter.test_source_groups:make_second")
    monkeypatch.setattr("tests.unit.drafter.test_source_groups.make_second", lambda config: second, raising=False)
    service = DrafterService(DrafterConfig())
    double.delay_s = 0.1
    first = await service.open(opening("a", (*BOTH, "second")))
    assert isinstance(first, Draft)
    assert first.more
    drafts = await rest(service, "a")
    assert [(draft.group, draft.more, set(draft.tree.sources)) for draft in drafts] == [
        ("second", True, {"prompt_lookup", "second"}),
        (NAME, False, {"prompt_lookup", "second", NAME}),
    ]
    assert drafts[1].drafting_s >= 0.1
    assert double.threads == {f"drafts-{NAME}"}
    assert second.threads == {"drafts-second"}


async def test_a_model_that_cannot_draft_yet_says_so_and_one_that_has_failed_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reading(ModelDouble):
        @override
        def _draft(self, wanted: DraftWanted) -> TokenTree | None:  # type: ignore[override]
            return None

    double = register(monkeypatch, Reading())
    service = DrafterService(DrafterConfig())
    double.fails_for = {"failed"}
    for name in ("failed", "reading"):
        await service.open(opening(name, (NAME,)))
        (draft,) = await rest(service, name)
        assert (len(draft.tree), draft.unready) == (0, name == "reading")


async def test_sessions_end_and_tenants_are_forgotten(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    await service.open(opening("a", tenant="one"))
    await service.open(opening("b", tenant="two"))
    async with asyncio.timeout(PATIENCE_S):
        await service.forget(ForgetTenant(tenant="one"))
    assert (double.closed, double.forgotten, service.sessions) == (["a"], ["one"], 1)
    # Who is still under way is opened anew.
    reply = await service.step(report("a", (3,)))
    assert isinstance(reply, DraftFailure)
    assert reply.reopen
    service.close(CloseSession(session_id="b"))
    await service.forget(ForgetTenant(tenant="nobody"))
    assert double.closed == ["a", "b"]
    assert await rest(service, "b") == []


async def test_a_model_that_hangs_has_forgotten_nobody(double: ModelDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.drafter.service._FORGET_S", 0.05)
    service = DrafterService(DrafterConfig())
    async with stuck(double):
        await service.open(opening("a", tenant="one"))
        await until(lambda: double.batches)
        with pytest.raises(TimeoutError):
            await service.forget(ForgetTenant(tenant="one"))
        assert double.forgotten == []
        assert isinstance(await service.open(opening("b", ("prompt_lookup",))), Draft)
    # It does so as soon as it can.
    await until(lambda: double.forgotten)
