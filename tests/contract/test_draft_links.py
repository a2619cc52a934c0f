"""One suite over both draft links; what each case observes is compared for equality."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.in_process import InProcessDraftLink
from speculation.columns import DraftColumns
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingReply,
    ForgetTenant,
    Forgotten,
    OpenSession,
    StepReport,
)
from speculation.ports import Drafter, DraftLink
from speculation.prefix import EMPTY_HASH, extend_hash
from tests.engine.fakes import RandomDrafter
from tests.running.patience import PATIENCE_S, until

Observed = list[object]


class Recorder:
    """Implements ``DraftReceiver``."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[DraftingReply] = asyncio.Queue()
        self.connected = asyncio.Event()

    def on_reply(self, reply: DraftingReply) -> None:
        self.replies.put_nowait(reply)

    def on_drafts(self, drafts: DraftColumns) -> None:
        for draft in drafts.alone():
            self.on_reply(draft)

    def on_connected(self) -> None:
        self.connected.set()


@asynccontextmanager
async def in_process(drafter: Drafter, silence_s: float = 60.0) -> AsyncIterator[tuple[DraftLink, Recorder]]:
    link, recorder = InProcessDraftLink(drafter, silence_s), Recorder()
    await link.start(recorder)
    yield link, recorder
    await link.stop()


@asynccontextmanager
async def over_grpc(drafter: Drafter, silence_s: float = 60.0) -> AsyncIterator[tuple[DraftLink, Recorder]]:
    server, port = await serve_drafter(drafter, "127.0.0.1:0", silence_s=silence_s)

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link, recorder = GrpcDraftLink(resolve), Recorder()
    await link.start(recorder)
    async with asyncio.timeout(PATIENCE_S):
        await recorder.connected.wait()
    yield link, recorder
    await link.stop()
    await server.stop(None)


def opening(
    name: str, tokens: tuple[int, ...], sources: tuple[str, ...] = ("prompt_lookup",), nodes: int = 4
) -> OpenSession:
    return OpenSession(
        session_id=name, tokens=tokens, prompt_length=len(tokens), sources=sources, max_nodes=nodes, tenant=""
    )


def report(name: str, before: tuple[int, ...], committed: tuple[int, ...]) -> StepReport:
    return StepReport(
        session_id=name,
        committed=committed,
        length=len(before) + len(committed),
        prefix_hash=extend_hash(EMPTY_HASH, before + committed),
        accepted_path=(),
        max_nodes=4,
    )


TEXT = (1, 2, 3, 4, 1, 2, 3)


async def drafts(link: DraftLink, recorder: Recorder) -> Observed:
    link.open(opening("a", TEXT))
    link.step(report("a", TEXT, (4, 1)))
    return [await recorder.replies.get() for _ in range(2)]


async def empty_trees(link: DraftLink, recorder: Recorder) -> Observed:
    link.open(opening("a", TEXT, ("autoregressive",)))
    return [await recorder.replies.get()]


async def many_sessions(link: DraftLink, recorder: Recorder) -> Observed:
    for index in range(20):
        link.open(opening(f"s{index}", (*TEXT, index)))
    for index in range(20):
        link.step(report(f"s{index}", (*TEXT, index), (1, 2)))
    for index in range(20):
        link.close(CloseSession(session_id=f"s{index}"))
    # In order for each session; those of different ones side by side.
    return sorted([await recorder.replies.get() for _ in range(40)], key=lambda reply: reply.session_id)


async def unknown_source(link: DraftLink, recorder: Recorder) -> Observed:
    link.open(opening("a", TEXT, ("nonsense",)))
    return [await recorder.replies.get()]


async def unknown_session(link: DraftLink, recorder: Recorder) -> Observed:
    link.step(report("nobody", TEXT, (1,)))
    return [await recorder.replies.get()]


async def missed_step(link: DraftLink, recorder: Recorder) -> Observed:
    link.open(opening("a", TEXT))
    link.step(report("a", (*TEXT, 5), (1,)))
    link.open(opening("a", (*TEXT, 5, 1)))
    return [await recorder.replies.get() for _ in range(3)]


async def closed_session(link: DraftLink, recorder: Recorder) -> Observed:
    link.open(opening("a", TEXT))
    link.close(CloseSession(session_id="a"))
    link.close(CloseSession(session_id="never opened"))
    link.step(report("a", TEXT, (4,)))
    return [await recorder.replies.get() for _ in range(2)]


async def a_forgotten_tenant(link: DraftLink, recorder: Recorder) -> Observed:
    link.open(opening("a", TEXT, ("recycling",)))
    link.open(opening("b", (1,), ("recycling",)))
    link.forget(ForgetTenant(tenant="", forget_id=7))
    link.forget(ForgetTenant(tenant="nobody", forget_id=8))
    replies = [await recorder.replies.get() for _ in range(4)]
    assert replies[2:] == [Forgotten(forget_id=7), Forgotten(forget_id=8)]
    link.open(opening("c", (1,), ("recycling",)))
    replies.append(await recorder.replies.get())
    assert [len(reply.tree) > 0 for reply in (replies[1], replies[-1])] == [True, False]
    # What lived when its tenant was forgotten lives no more; what came later does.
    link.step(report("a", TEXT, (4,)))
    link.step(report("c", (1,), (4,)))
    replies += sorted([await recorder.replies.get() for _ in range(2)], key=lambda reply: reply.session_id)
    assert isinstance(replies[-2], DraftFailure) and replies[-2].reopen
    assert isinstance(replies[-1], Draft)
    return replies


async def a_large_prompt(link: DraftLink, recorder: Recorder) -> Observed:
    link.open(opening("a", tuple(index % 100_000 for index in range(300_000))))
    return [await recorder.replies.get()]


CASES = [
    drafts,
    empty_trees,
    many_sessions,
    unknown_source,
    unknown_session,
    missed_step,
    closed_session,
    a_forgotten_tenant,
    pytest.param(a_large_prompt, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_both_links_behave_alike(case: Callable[[DraftLink, Recorder], Awaitable[Observed]]) -> None:
    observed = []
    for connect in (in_process, over_grpc):
        async with connect(DrafterService(DrafterConfig())) as (link, recorder), asyncio.timeout(PATIENCE_S):
            observed.append(await case(link, recorder))
    assert observed[0]
    assert observed[0] == observed[1]


@pytest.mark.parametrize("connect", [in_process, over_grpc], ids=["in_process", "grpc"])
async def test_a_drafter_that_raises_keeps_its_link(connect: Callable[..., object]) -> None:
    drafter = RandomDrafter(mood="failing")
    async with connect(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):  # type: ignore[attr-defined]
        link.open(opening("a", TEXT))
        reply = await recorder.replies.get()
        assert "the drafter failed" in reply.reason
        assert "planted" not in reply.reason
        drafter.mood = "good"
        link.open(opening("a", TEXT))
        assert len((await recorder.replies.get()).tree) > 0


async def test_a_stream_that_ends_closes_its_sessions() -> None:
    drafter = DrafterService(DrafterConfig())
    async with over_grpc(drafter) as (link, recorder), asyncio.timeout(PATIENCE_S):
        link.open(opening("a", TEXT))
        await recorder.replies.get()
        assert drafter.sessions == 1
        await link.stop()
        await until(lambda: not drafter.sessions)


async def test_a_drafter_that_comes_back_is_found() -> None:
    drafter = DrafterService(DrafterConfig())
    server, port = await serve_drafter(drafter, "127.0.0.1:0")
    ports = [port]

    async def resolve() -> str:
        return f"127.0.0.1:{ports[-1]}"

    link, recorder = GrpcDraftLink(resolve), Recorder()
    await link.start(recorder)
    async with asyncio.timeout(PATIENCE_S):
        await recorder.connected.wait()
        recorder.connected.clear()
        await server.stop(None)
        await until(lambda: not link.connected)
        link.open(opening("lost", TEXT))
        server, port = await serve_drafter(drafter, "127.0.0.1:0")
        ports.append(port)
        await recorder.connected.wait()
        link.open(opening("a", TEXT))
        assert (await recorder.replies.get()).session_id == "a"
    await link.stop()
    await server.stop(None)
