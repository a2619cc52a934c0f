"""What remains of a conversation that ends, breaks or falls silent: no session; and it begins anew. Over both links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links import draft_server
from services.links.call_queue import CallQueue
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.in_process import InProcessDraftLink
from services.links.open_sessions import OpenSessions
from speculation.messages import CloseSession, Draft, DraftFailure, DraftingReply, ForgetTenant, OpenSession
from speculation.ports import DraftLink
from tests.contract.test_draft_links import TEXT, Recorder, in_process, opening, over_grpc, report
from tests.engine.fakes import RandomDrafter
from tests.running.patience import PATIENCE_S, until

Connect = Callable[..., AbstractAsyncContextManager[tuple[DraftLink, Recorder]]]
BOTH = pytest.mark.parametrize("connect", [in_process, over_grpc], ids=["in_process", "grpc"])


@BOTH
async def test_a_session_whose_end_is_lost_is_gone_soon_and_one_that_lives_is_not(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, now = DrafterService(DrafterConfig()), 0.0
    monkeypatch.setattr(
        draft_server, "OpenSessions", lambda drafter, silence_s, _: OpenSessions(drafter, silence_s, lambda: now)
    )
    async with connect(drafter, silence_s=0.2) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening("lost", TEXT))
        link.open(opening("live", TEXT))
        for _ in range(2):
            assert isinstance(await recorder.replies.get(), Draft)
        assert drafter.sessions == 2
        now = 0.15
        link.step(report("live", TEXT, (4,)))
        assert isinstance(await recorder.replies.get(), Draft)
        now = 0.25
        await until(lambda: drafter.sessions == 1)
        link.step(report("live", (*TEXT, 4), (4,)))
        assert isinstance(await recorder.replies.get(), Draft)
        # One that was only slow goes on where it was.
        link.step(report("lost", TEXT, (4,)))
        refused = await recorder.replies.get()
        assert refused == DraftFailure(session_id="lost", reason="unknown session", reopen=True)
        link.open(opening("lost", (*TEXT, 4)))
        assert isinstance(await recorder.replies.get(), Draft)


@BOTH
async def test_a_link_that_stops_leaves_no_session(connect: Connect) -> None:
    drafter = DrafterService(DrafterConfig())
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening("a", TEXT))
        link.open(opening("b", TEXT))
        for _ in range(2):
            await recorder.replies.get()
        assert drafter.sessions == 2
        await link.stop()
        await until(lambda: not drafter.sessions)


class SlowDrafter(RandomDrafter):
    """Takes its time before it opens a session."""

    def __init__(self) -> None:
        super().__init__(mood="good")
        self.opening = asyncio.Event()

    @override
    async def open(self, message: OpenSession) -> Draft | DraftFailure:
        self.opening.set()
        await asyncio.sleep(0.2)
        return await super().open(message)


@BOTH
async def test_what_is_being_opened_when_a_link_stops_is_not_left_behind(connect: Connect) -> None:
    """Nor what waits behind it."""
    drafter = SlowDrafter()
    async with connect(drafter) as (link, _), asyncio.timeout(PATIENCE_S):
        link.open(opening("a", TEXT))
        link.step(report("a", TEXT, (4,)))
        link.open(opening("a", TEXT))
        await drafter.opening.wait()
        await link.stop()
        await asyncio.sleep(0.6)
        await until(lambda: drafter.sessions == {})


class Stumbling(Recorder):
    """Raises at its first reply: a fault of ours, which must not end drafting."""

    def __init__(self) -> None:
        super().__init__()
        self.stumbled = False
        self.connections = 0

    @override
    def on_reply(self, reply: DraftingReply) -> None:
        if not self.stumbled:
            self.stumbled = True
            raise RuntimeError("planted")
        super().on_reply(reply)

    @override
    def on_connected(self) -> None:
        self.connections += 1
        super().on_connected()


@pytest.mark.parametrize("grpc", [False, True], ids=["in_process", "grpc"])
async def test_a_pump_that_fails_says_so_and_begins_anew(grpc: bool, caplog: pytest.LogCaptureFixture) -> None:
    drafter, recorder = RandomDrafter(mood="good"), Stumbling()
    server, port = await serve_drafter(drafter, "127.0.0.1:0")

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link: DraftLink = GrpcDraftLink(resolve) if grpc else InProcessDraftLink(drafter)
    async with asyncio.timeout(PATIENCE_S):
        await link.start(recorder)
        await recorder.connected.wait()
        recorder.connected.clear()
        with caplog.at_level(logging.WARNING):
            link.open(opening("a", TEXT))
            await recorder.connected.wait()
        assert link.connected
        assert recorder.connections == 2
        assert "planted" in caplog.text
        # The sessions of before are gone: whoever is told that a drafter is there opens them anew.
        link.open(opening("b", TEXT))
        assert (await recorder.replies.get()).session_id == "b"  # type: ignore[union-attr]
        assert len(drafter.sessions) == 1
    await link.stop()
    await server.stop(None)


class Unspeakable(RandomDrafter):
    """Says what no message can hold."""

    @override
    async def _draft(self, session_id: str, max_nodes: int) -> Draft | DraftFailure:
        draft = await super()._draft(session_id, max_nodes)
        assert isinstance(draft, Draft)
        if session_id.endswith("bad"):
            return replace(draft, tree=replace(draft.tree, tokens=(-1, *draft.tree.tokens[1:])))
        return draft


@BOTH
async def test_a_reply_that_cannot_be_sent_concerns_its_session_only(connect: Connect) -> None:
    async with connect(Unspeakable(mood="good")) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening("bad", TEXT))
        assert isinstance(await recorder.replies.get(), DraftFailure)
        recorder.connected.clear()
        link.open(opening("a", TEXT))
        assert isinstance(await recorder.replies.get(), Draft)
        assert link.connected and not recorder.connected.is_set()


class Stuck(RandomDrafter):
    """Answers nothing while it forgets somebody."""

    def __init__(self) -> None:
        super().__init__(mood="good")
        self.freed = asyncio.Event()

    @override
    async def forget(self, message: ForgetTenant) -> None:
        await self.freed.wait()


@BOTH
async def test_a_drafter_that_answers_nothing_at_all_is_given_up_and_found_again(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallQueue, "most_calls", 50)
    drafter = Stuck()
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.forget(ForgetTenant(tenant="somebody", forget_id=1))
        await asyncio.sleep(0.05)
        recorder.connected.clear()
        # Messages of some size: a stream's buffers hold many small ones.
        text = tuple(range(100_000, 130_000))
        for index in range(400):
            link.open(opening(f"s{index}", text))
            await asyncio.sleep(0)
        drafter.freed.set()
        await recorder.connected.wait()
        while not recorder.replies.empty():
            recorder.replies.get_nowait()
        link.open(opening("after", TEXT))
        while (await recorder.replies.get()).session_id != "after":  # type: ignore[union-attr]
            pass


class Slow(RandomDrafter):
    """Does not forget in time."""

    @override
    async def forget(self, message: ForgetTenant) -> None:
        raise TimeoutError


@BOTH
async def test_a_drafter_that_forgets_too_late_says_so_in_one_line(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(Slow(mood="good")) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.forget(ForgetTenant(tenant="somebody", forget_id=1))
        link.open(opening("after", TEXT))
        # The promise is not kept, so it is not confirmed.
        assert isinstance(await recorder.replies.get(), Draft)
    (told,) = [record for record in caplog.records if "forgotten" in record.message]
    assert told.levelno == logging.ERROR
    assert told.exc_info is None


def test_sessions_are_closed_by_the_time_since_they_were_heard_of() -> None:
    closed: list[str] = []

    class Closing(RandomDrafter):
        @override
        def close(self, message: CloseSession) -> None:
            closed.append(message.session_id)
            if message.session_id == "bad":
                raise RuntimeError("planted")

    now = 0.0
    sessions = OpenSessions(Closing(), 10.0, clock=lambda: now)
    for name in ("bad", "b", "c"):
        sessions.opened(name)
    now = 6.0
    sessions.heard("b")
    sessions.heard("never opened")
    assert sessions.close_silent() == 4.0
    assert closed == []
    now = 10.0
    assert sessions.close_silent() == 6.0
    assert closed == ["bad", "c"]
    sessions.close_all()
    assert closed == ["bad", "c", "b"]
    assert sessions.close_silent() == 10.0
