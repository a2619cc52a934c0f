"""A drafter's side of a draft link: the drafts of a step that need no wait go back together, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from services.links.call_queue import CallQueue
from services.links.draft_server import converse
from speculation.messages import CloseSession, Draft, DraftingReply, FeatureChunk, ForgetTenant, OpenSession, StepReport
from speculation.tree import chain

# More than go back together.
_SESSIONS = 150


class HalfAtOnce:
    """A drafter that drafts at once for most sessions, waits for some, and fails for one."""

    async def open(self, message: OpenSession) -> Draft | None:
        raise NotImplementedError

    def at_once(self, message: StepReport) -> Draft | None:
        if message.session_id == "7":
            raise ValueError("a fault of the drafter")
        return None if int(message.session_id) % 10 == 3 else draft_of(message)

    async def step(self, message: StepReport) -> Draft | None:
        await asyncio.sleep(0)
        return draft_of(message)

    async def further(self, session_id: str) -> AsyncIterator[Draft]:
        return
        yield

    def features(self, message: FeatureChunk) -> None:
        raise NotImplementedError

    def close(self, message: CloseSession) -> None:
        """Closes nothing."""

    async def forget(self, message: ForgetTenant) -> None:
        raise NotImplementedError


def draft_of(report: StepReport) -> Draft:
    return Draft(session_id=report.session_id, base_length=report.length, base_hash=0, tree=chain([5], "suffix"))


def report_of(session: int) -> StepReport:
    return StepReport(
        session_id=str(session), committed=(1,), length=session + 9, prefix_hash=0, accepted_path=(), max_nodes=4
    )


async def _answers() -> list[list[DraftingReply]]:
    calls = CallQueue()
    for session in range(_SESSIONS):
        assert calls.push(report_of(session))
    calls.end()
    async with aclosing(converse(HalfAtOnce(), calls, silence_s=60.0)) as replies:
        return [ready async for ready in replies]


def test_every_report_of_a_step_is_answered_once_and_most_together() -> None:
    answers = asyncio.run(_answers())
    names = [int(reply.session_id) for ready in answers for reply in ready if not hasattr(reply, "forget_id")]
    assert sorted(names) == list(range(_SESSIONS))
    assert [name for name in names if name % 10 != 3] == [name for name in range(_SESSIONS) if name % 10 != 3]
    drafts = [reply for ready in answers for reply in ready if isinstance(reply, Draft)]
    assert len(drafts) == _SESSIONS - 1
    assert all(draft.base_length == int(draft.session_id) + 9 for draft in drafts)
    assert len(answers) < _SESSIONS / 5
