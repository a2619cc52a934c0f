"""A drafter's side of a draft link: the drafts of a step that need no wait go back together, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from services.links.call_queue import CallQueue
from services.links.codec.drafting import decode_together, each_alone, encode_drafting_calls
from services.links.draft_server import converse
from speculation.columns import DraftColumns, ReportColumns
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingReply,
    FeatureChunk,
    ForgetTenant,
    OpenSession,
    StepReport,
)
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


class HalfTogether(HalfAtOnce):
    """The same, but it drafts together for every second session; ``fails``: for none."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails
        self.together_for: list[str] = []

    def together(self, reports: ReportColumns) -> DraftColumns:
        if self._fails:
            raise ValueError("a fault of the drafter")
        done = [at for at, name in enumerate(reports.session_ids) if int(name) % 2 == 0]
        self.together_for += [reports.session_ids[at] for at in done]
        return DraftColumns(
            left=[at for at in range(len(reports)) if at not in done],
            session_ids=[reports.session_ids[at] for at in done],
            base_lengths=[reports.lengths[at] for at in done],
            base_hashes=[0] * len(done),
            node_counts=[1] * len(done),
            tokens=[5] * len(done),
            parents=[-1] * len(done),
            sources=[0] * len(done),
            source_names=("suffix",),
            scores=[1.0] * len(done),
            drafting_s=0.0,
            group="",
        )


def draft_of(report: StepReport) -> Draft:
    return Draft(session_id=report.session_id, base_length=report.length, base_hash=0, tree=chain([5], "suffix"))


def report_of(session: int) -> StepReport:
    return StepReport(
        session_id=str(session), committed=(1,), length=session + 9, prefix_hash=0, accepted_path=(), max_nodes=4
    )


async def _answers(drafter: HalfAtOnce, *, columns: bool = False) -> list[list[DraftingReply]]:
    calls = CallQueue()
    reports = [report_of(session) for session in range(_SESSIONS)]
    if columns:
        (wire,) = encode_drafting_calls(reports)
        read = decode_together(wire)
        assert isinstance(read, ReportColumns) and calls.push(read)
        assert len(calls) == _SESSIONS
    else:
        assert all(calls.push(report) for report in reports)
    calls.end()
    async with aclosing(converse(drafter, calls, silence_s=60.0)) as replies:
        return [[*each_alone(ready)] async for ready in replies]


@pytest.mark.parametrize("columns", [False, True], ids=["one by one", "columns"])
def test_every_report_of_a_step_is_answered_once_and_most_together(columns: bool) -> None:
    answers = asyncio.run(_answers(HalfAtOnce(), columns=columns))
    names = [int(reply.session_id) for ready in answers for reply in ready if not hasattr(reply, "forget_id")]
    assert sorted(names) == list(range(_SESSIONS))
    assert [name for name in names if name % 10 != 3] == [name for name in range(_SESSIONS) if name % 10 != 3]
    drafts = [reply for ready in answers for reply in ready if isinstance(reply, Draft)]
    assert len(drafts) == _SESSIONS - 1
    assert all(draft.base_length == int(draft.session_id) + 9 for draft in drafts)
    assert len(answers) < _SESSIONS / 5


def test_what_is_drafted_together_is_not_drafted_again_and_the_rest_is() -> None:
    drafter = HalfTogether()
    answers = asyncio.run(_answers(drafter, columns=True))
    drafts = [reply for ready in answers for reply in ready if isinstance(reply, Draft)]
    # The seventh fails, as ever.
    assert sorted(int(draft.session_id) for draft in drafts) == [name for name in range(_SESSIONS) if name != 7]
    assert all(draft.base_length == int(draft.session_id) + 9 for draft in drafts)
    assert [int(draft.session_id) for draft in drafts[: _SESSIONS // 2]] == [*range(0, _SESSIONS, 2)]
    assert [*map(int, drafter.together_for)] == [*range(0, _SESSIONS, 2)]


def test_where_drafting_together_fails_it_is_not_tried_again() -> None:
    (failures,) = asyncio.run(_answers(HalfTogether(fails=True), columns=True))
    assert [failure.session_id for failure in failures if isinstance(failure, DraftFailure)] == [*map(str, range(_SESSIONS))]
