"""Forgetting a tenant: what the target and the drafter hear of it, and what becomes of requests under way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from typing_extensions import override

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.in_process import InProcessDraftLink
from services.verifier.engine.forgetting import Forgetting
from speculation.errors import Unavailable
from speculation.messages import Draft, DraftFailure, ForgetTenant, OpenSession
from speculation.ports import DraftReceiver
from speculation.types import Plan
from tests.engine.fakes import RandomDrafter, ToyTarget, collect, decoding, request
from tests.running.patience import PATIENCE_S, until, wait_for_every_draft


class RejoiningLink(InProcessDraftLink):
    """Can seem to have been away."""

    @override
    async def start(self, receiver: DraftReceiver) -> None:
        self.reconnect = receiver.on_connected
        await super().start(receiver)


async def test_a_drafter_that_returns_is_told_whom_to_forget() -> None:
    drafter = RandomDrafter()
    target = ToyTarget()
    link = RejoiningLink(drafter)
    async with decoding(target, link) as loop:
        # An idle loop wakes for it.
        async with asyncio.timeout(PATIENCE_S):
            await loop.forget("one")
            await loop.forget("two")
        # Both have, when the answer comes.
        assert target.forgotten == ["one", "two"]
        assert drafter.forgotten == ["one", "two"]
        link.reconnect()
        await until(lambda: drafter.forgotten == ["one", "two"] * 2)
    with pytest.raises(Unavailable):
        await loop.forget("three")


@pytest.mark.examples(2)
@pytest.mark.parametrize("when", ["live", "waiting"])
async def test_what_is_under_way_leaves_nothing_to_a_forgotten_tenant(when: str) -> None:
    """Not even where a drafter asks for it anew, or it has to step back."""
    opened: list[str | None] = []
    drafter, target = RandomDrafter(), ToyTarget(rooms=1)
    target.delay_s = 0.01
    begin = drafter.open

    async def opening(message: OpenSession) -> Draft | DraftFailure:
        opened.append(message.tenant)
        return await begin(message)

    drafter.open = opening  # type: ignore[method-assign]
    link = RejoiningLink(drafter)
    async with decoding(target, link) as loop:
        wanted = [replace(request(name, [1, 2], max_tokens=60, ignore_eos=True), tenant="one") for name in ("a", "b")]
        running = [asyncio.create_task(collect(loop, one)) for one in wanted[: 1 if when == "live" else 2]]
        await until(lambda: opened)
        await loop.forget("one")
        link.reconnect()
        await asyncio.gather(*running)
        await until(lambda: len(target.forgotten) >= 1 + len(running))
    assert opened[0] == "one"
    assert len(opened) > 1
    # Drafters do not learn any more whose it is; what it left in the target's cache under a name of its own goes with it.
    assert set(opened[1:]) == {None}
    assert {f"forgotten/{one.request_id}" for one in wanted[: len(running)]} < set(target.forgotten)


class Answering:
    """A way to a drafter that answers when it is told to."""

    def __init__(self) -> None:
        self.told: list[ForgetTenant] = []

    def forget(self, message: ForgetTenant) -> None:
        self.told.append(message)


def forgetting_of_two(within_s: float = PATIENCE_S) -> tuple[Forgetting, ToyTarget, Answering, Answering]:
    target, first, second = ToyTarget(), Answering(), Answering()
    links = {"first": first, "second": second}
    return Forgetting(target, links, within_s), target, first, second  # type: ignore[arg-type]


async def test_whoever_has_not_answered_is_named() -> None:
    forgetting, target, first, second = forgetting_of_two(within_s=0.05)
    with pytest.raises(Unavailable, match=r"^the target and first and second did not answer within 0.05 s"):
        await forgetting.forget("one")
    waiting = asyncio.create_task(forgetting.forget("one"))
    await asyncio.sleep(0)
    forgetting.between_passes()
    assert target.forgotten == ["one"]
    # Each is asked under a number of its own: what one has done, the other has not.
    assert first.told[-1].forget_id != second.told[-1].forget_id
    forgetting.answered("first", first.told[-1].forget_id)
    forgetting.answered("first", 10**6)
    with pytest.raises(Unavailable, match=r"^second did"):
        await waiting


async def test_a_drafter_that_returns_in_time_is_told_again_and_its_answer_counts() -> None:
    forgetting, _, first, second = forgetting_of_two()
    waiting = [asyncio.create_task(forgetting.forget("one")) for _ in range(2)]
    await asyncio.sleep(0)
    forgetting.between_passes()
    forgetting.answered("first", first.told[-1].forget_id)
    # What it was told before it went away nobody answers.
    second.told.clear()
    forgetting.connected("second")
    assert [message.tenant for message in second.told] == ["one"]
    forgetting.answered("second", second.told[-1].forget_id)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*waiting)


async def test_no_drafter_confirms_for_another() -> None:
    """The numbers are easily guessed: what counts is whose stream they came on."""
    forgetting, _, first, second = forgetting_of_two(within_s=0.1)
    waiting = asyncio.create_task(forgetting.forget("one"))
    await asyncio.sleep(0)
    forgetting.between_passes()
    for guess in range(10):
        forgetting.answered("first", guess)
    with pytest.raises(Unavailable, match=r"^second did"):
        await waiting
    # Nor does its guess spoil what the other one says later.
    waiting = asyncio.create_task(forgetting.forget("one"))
    await asyncio.sleep(0)
    forgetting.between_passes()
    for name, link in (("first", second), ("second", first)):
        forgetting.answered(name, link.told[-1].forget_id)
    await asyncio.sleep(0)
    assert not waiting.done()
    for name, link in (("first", first), ("second", second)):
        forgetting.answered(name, link.told[-1].forget_id)
    async with asyncio.timeout(PATIENCE_S):
        await waiting


async def test_what_is_remembered_of_forgetting_is_bounded() -> None:
    forgetting, _, first, _ = forgetting_of_two()
    for number in range(1500):
        forgetting.tell(f"tenant {number}")
    first.told.clear()
    forgetting.connected("first")
    assert [message.tenant for message in first.told] == [f"tenant {number}" for number in range(1500 - 1024, 1500)]
    assert len(forgetting._answers) == 2 * 1024


@pytest.mark.exhaustive
async def test_a_verifier_whose_drafter_is_away_says_so() -> None:
    drafter, ports = DrafterService(DrafterConfig()), [1]

    async def resolve() -> str:
        return f"127.0.0.1:{ports[-1]}"

    target, link = ToyTarget(), GrpcDraftLink(resolve)
    async with decoding(target, link, forget_within_s=0.3) as loop:
        with pytest.raises(Unavailable, match="the drafter"):
            await loop.forget("one")
        # That much is done.
        await until(lambda: target.forgotten == ["one"])
        server, port = await serve_drafter(drafter, "127.0.0.1:0")
        ports.append(port)
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: link.connected)
            loop._forgetting._within_s = PATIENCE_S
            await loop.forget("one")
    await server.stop(None)


async def test_live_sessions_of_a_forgotten_tenant_leave_nothing_at_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request under way is drafted for anew in a name of its own, and what it had told before is gone."""
    drafter, target = DrafterService(DrafterConfig()), ToyTarget()
    target.delay_s = 0.005
    plan = Plan(strategy="test", sources=("recycling",), max_nodes=6)
    wait_for_every_draft(monkeypatch)
    async with decoding(target, InProcessDraftLink(drafter)) as loop, asyncio.timeout(PATIENCE_S):
        wanted = replace(request("a", [1, 2, 3], plan, max_tokens=200, ignore_eos=True), tenant="one")
        running = asyncio.create_task(collect(loop, wanted))
        await until(lambda: loop.stats.drafts_used >= 3)
        await loop.forget("one")
        tokens, _, _ = await running
        assert loop.stats.drafts_used > 20
        # Nothing is known that was said in its name.
        asked = OpenSession(
            session_id="b", tenant="one", tokens=(3, tokens[0]), prompt_length=2, sources=("recycling",), max_nodes=6
        )
        draft = await drafter.open(asked)
        assert isinstance(draft, Draft) and len(draft.tree) == 0
