"""Text sources and models draft apart: batches, delays, failures, and the hidden states that models are given."""

from __future__ import annotations

import asyncio
import gc
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.drafter.blend import BlendSession
from services.drafter.calibrator import Calibrator
from services.drafter.config import DrafterConfig
from services.drafter.drafting_thread import DraftingThread
from services.drafter.interfaces import DraftWanted, TreeSource
from services.drafter.known_states import BoundedStates, KnownStates
from services.drafter.service import DrafterService
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    FeatureChunk,
    ForgetTenant,
    OpenSession,
    StepReport,
)
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.sources import SOURCES, SourceSpec
from speculation.tree import chain
from speculation.types import Features, Observation, TokenTree
from tests.model_source import LAYERS, NAME, ModelDouble, register
from tests.patience import PATIENCE_S, until

TEXT = (1, 2, 3, 1, 2)
BOTH = ("prompt_lookup", NAME)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> ModelDouble:
    return register(monkeypatch, ModelDouble(answer=(7, 8, 9)))


def opening(name: str, sources: tuple[str, ...] = BOTH, tokens: tuple[int, ...] = TEXT, tenant: str = "") -> OpenSession:
    return OpenSession(
        session_id=name, tokens=tokens, prompt_length=len(tokens), sources=sources, max_nodes=8, tenant=tenant
    )


def report(
    name: str, committed: tuple[int, ...], before: tuple[int, ...] = TEXT, features: Features | None = None
) -> StepReport:
    return StepReport(
        session_id=name,
        committed=committed,
        length=len(before) + len(committed),
        prefix_hash=extend_hash(EMPTY_HASH, before + committed),
        accepted_path=(),
        max_nodes=8,
        observation=None if features is None else Observation(features=features),
    )


async def rest(service: DrafterService, name: str) -> list[Draft]:
    return [draft async for draft in service.further(name)]


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
    monkeypatch.setattr("tests.model_source.make", die)
    other = DrafterService(DrafterConfig())
    assert isinstance(await other.open(opening("a")), Draft)
    assert [len(draft.tree) for draft in await rest(other, "a")] == [0]


async def test_two_models_draft_in_groups_of_their_own(double: ModelDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    second = ModelDouble(answer=(5,))
    spec = SourceSpec(name="second", kind="model", made_by="tests.unit.test_source_groups:make_second")
    monkeypatch.setitem(SOURCES, "second", spec)
    monkeypatch.setattr("tests.unit.test_source_groups.make_second", lambda config: second, raising=False)
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


# --- hidden states ------------------------------------------------------------------------------------------------


def rows(start: int, stop: int, layers: tuple[int, ...] = LAYERS) -> Features:
    """Two numbers for each layer: the layer and the position."""
    numbers = [number for position in range(start, stop) for layer in layers for number in (layer, position)]
    return Features(
        data=struct.pack(f"<{len(numbers)}e", *numbers),
        rows=stop - start,
        width=2 * len(layers),
        dtype="float16",
        start=start,
        layers=layers,
    )


def row(position: int) -> bytes:
    return rows(position, position + 1).data


async def test_a_model_is_given_the_states_that_have_come(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    service.features(FeatureChunk(session_id="a", features=rows(0, 4)))
    await service.open(opening("a"))
    await rest(service, "a")
    # What came before the session was opened is nobody's; nothing is guessed.
    assert double.masked["a"] == [0, 1, 2, 3]
    # More layers than it reads, in another order, and one position less.
    service.features(FeatureChunk(session_id="a", features=rows(0, 3, (-1, 0, 1, 2))))
    await service.step(report("a", (9, 4), features=rows(4, 6)))
    await rest(service, "a")
    assert double.masked["a"] == [3]
    assert double.states["a"] == {position: row(position) for position in (0, 1, 2, 4, 5)}
    # A layer that it reads is not there: nor is the position.
    service.features(FeatureChunk(session_id="a", features=rows(3, 4, (1, 2))))
    service.features(FeatureChunk(session_id="nobody", features=rows(0, 4)))
    await service.step(report("a", (5,), (*TEXT, 9, 4)))
    await rest(service, "a")
    assert double.masked["a"] == [3, 6]
    # Opened anew, it has none until they are told again.
    await service.open(opening("a"))
    await rest(service, "a")
    assert double.masked["a"] == [0, 1, 2, 3]


async def test_states_are_kept_for_those_that_read_them_and_no_longer(double: ModelDouble) -> None:
    service = DrafterService(DrafterConfig())
    await service.open(opening("text", ("prompt_lookup",)))
    await service.open(opening("model"))
    for name in ("text", "model"):
        service.features(FeatureChunk(session_id=name, features=rows(0, 5)))
    assert service._states.size == 5 * 12
    service.close(CloseSession(session_id="model"))
    assert service._states.size == 0


def test_states_are_bounded_and_who_holds_most_loses_its_oldest() -> None:
    bounded, small, large = BoundedStates(12 * 10), KnownStates(), KnownStates()
    bounded.add(small, rows(0, 3))
    for start in range(0, 12, 2):
        bounded.add(large, rows(start, start + 2))
    assert bounded.size <= 12 * 10
    assert small.known(0, 20) == [0, 1, 2]
    assert large.known(0, 20) == [6, 7, 8, 9, 10, 11]
    # A row that came again is not lost with its first coming.
    bounded.add(small, rows(0, 3))
    bounded.add(large, rows(12, 14))
    assert small.known(0, 3) == [0, 1, 2]
    bounded.forget(large)
    bounded.forget(large)
    assert bounded.size == small.size


# --- text sources ---------------------------------------------------------------------------------------------------


class _Slow(TreeSource):
    def __init__(self) -> None:
        self.thread = ""
        self.enough = threading.Event()

    def open(self, message: OpenSession) -> _Slow:
        return self

    def draft(self, max_nodes: int) -> TokenTree:
        self.thread = threading.current_thread().name
        assert self.enough.wait(PATIENCE_S)
        return chain([1], "slow")

    def observe(self, report: StepReport) -> None: ...

    def close(self) -> None:
        raise RuntimeError("planted failure")


async def test_text_sources_do_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    monkeypatch.setitem(SOURCES, "slow", SourceSpec(name="slow", made_by="tests.unit.test_source_groups:make_slow"))
    monkeypatch.setattr("tests.unit.test_source_groups.make_slow", lambda config: slow, raising=False)
    service = DrafterService(DrafterConfig())
    drafting = asyncio.create_task(service.open(opening("a", ("slow",))))
    await until(lambda: slow.thread)
    assert slow.thread == "drafts-text"
    # It ends when the event loop says so, which therefore runs.
    slow.enough.set()
    assert isinstance(await drafting, Draft)
    # Nobody waits for how it closes.
    service.close(CloseSession(session_id="a"))
    assert isinstance(await service.open(opening("b", ("prompt_lookup",))), Draft)


class _Failing:
    """A path source that fails in one of its calls."""

    def __init__(self, at: str) -> None:
        self.at = at

    def _do(self, at: str) -> None:
        if at == self.at:
            raise RuntimeError("planted failure")

    def start(self) -> int:
        self._do("start")
        return 0

    def follow(self, place: int, token: int) -> int:
        self._do("follow")
        return 0

    def candidates(self, place: int) -> list[tuple[int, str]]:
        self._do("candidates")
        return [(5, "b:0")]

    def observe(self, report: StepReport) -> None:
        self._do("observe")

    def catch_up(self) -> bool:
        self._do("catch_up")
        return False

    def close(self) -> None: ...


@pytest.mark.parametrize("at", ["start", "follow", "candidates", "observe", "catch_up"])
def test_a_text_source_that_fails_costs_its_own_nodes(at: str) -> None:
    blend = BlendSession({"good": _Failing("never"), "bad": _Failing(at)}, Calibrator({"b:0": 0.5}))
    for _ in range(2):
        assert set(blend.draft(3).sources) == {"good"}
        blend.observe(report("s", (5,)))
        assert not blend.catch_up()
    blend.close()


async def test_what_takes_no_time_is_done_at_once_unless_the_thread_is_at_work() -> None:
    thread, names = DraftingThread("at work"), []

    def note() -> None:
        names.append(threading.current_thread().name)

    here = threading.current_thread().name
    await thread.run(note, expected_s=0.0001)
    await thread.run(note, expected_s=0.01)
    await thread.run(note, expected_s=0.0001)
    assert names == [here, "at work", here]
    gate = threading.Event()
    waiting = thread.run(gate.wait)
    behind = thread.run(note, expected_s=0.0001)
    assert not behind.done()
    gate.set()
    await asyncio.gather(waiting, behind)
    assert names[3:] == ["at work"]
    for function in (lambda: 1 / 0, exit):
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            await thread.run(function, expected_s=0.0)


async def test_a_thread_runs_in_order_and_later_what_can_wait() -> None:
    thread, ran = DraftingThread("t"), []
    gate = threading.Event()
    first = thread.run(gate.wait)
    futures = [thread.run(ran.append, "later", later=True), *(thread.run(ran.append, n) for n in range(3))]
    gate.set()
    await asyncio.gather(first, *futures)
    assert ran == [0, 1, 2, "later"]
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="SystemExit"):
        await thread.run(exit)
    left = [thread.run(ran.append, "told"), thread.run(ran.append, "never", later=True)]
    for future in left:
        future.cancel()
    await thread.run(lambda: None, later=True)
    assert ran[-1] == "told"
    (running,) = [each for each in threading.enumerate() if each.name == "t"]
    del thread, first, futures, left
    gc.collect()
    running.join(5)
    assert not running.is_alive()
