"""What both draft links share: a drafter's side of the conversation."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence

from outrider.internal.v1 import drafting_pb2
from services.links.call_queue import END, CallQueue
from services.links.codec.drafting import encode_drafting_reply
from services.links.open_sessions import OpenSessions
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingReply,
    FeatureChunk,
    ForgetTenant,
    Forgotten,
    OpenSession,
    SessionCall,
    StepReport,
)
from speculation.ports import Drafter

log = logging.getLogger(__name__)

# What concerns one session, in the order in which it was said.
_OfSession = SessionCall | FeatureChunk


async def converse(drafter: Drafter, calls: CallQueue, silence_s: float) -> AsyncGenerator[DraftingReply, None]:
    """Answer calls in their order until ``END``; with nothing to answer, draft ahead for those who were answered last.

    Whatever ends it, the sessions that it has opened are closed: whoever leaves it early closes it (``aclosing``).

    Args:
        silence_s: seconds after which a session of which nothing is said is closed.
    """
    conversation = _Conversation(drafter, calls, silence_s)
    watching = asyncio.create_task(conversation.watch(), name="silent-sessions")
    ahead: dict[str, None] = {}
    try:
        while True:
            if ahead and not len(calls):
                session_id = next(iter(ahead))
                del ahead[session_id]
                for draft in conversation.ahead(session_id):
                    yield draft
                # A call that came meanwhile goes first.
                await asyncio.sleep(0)
                continue
            waiting = [await calls.get()]
            # What was asked before a tenant is forgotten is answered before.
            while len(calls) and not isinstance(waiting[-1], ForgetTenant):
                waiting.append(calls.get_nowait())
            for together in _rounds([call for call in waiting if isinstance(call, _OfSession)]):
                for answering in conversation.answers(together):
                    reply = await answering
                    if isinstance(reply, Draft):
                        ahead[reply.session_id] = None
                    if reply is not None:
                        yield reply
            if isinstance(last := waiting[-1], ForgetTenant) and conversation.forget(last):
                yield Forgotten(forget_id=last.forget_id)
            if END in waiting:
                return
    finally:
        watching.cancel()
        await conversation.end()


def encode_reply(reply: DraftingReply) -> drafting_pb2.DraftResponse:
    """The message for ``reply``; what a drafter says that cannot be said in one concerns its session only."""
    try:
        return encode_drafting_reply(reply)
    except (ValueError, TypeError):
        if isinstance(reply, Forgotten):
            raise
        log.exception("a draft for %s cannot be sent", reply.session_id)
        return encode_drafting_reply(_failure(reply.session_id))


def _failure(session_id: str) -> DraftFailure:
    return DraftFailure(session_id=session_id, reason="the drafter failed; its log says why")


def _rounds(calls: Iterable[_OfSession]) -> list[list[_OfSession]]:
    """Calls that are answered together, so that their look-ups share messages; those of one session one after the other."""
    rounds: list[list[_OfSession]] = []
    earlier: Counter[str] = Counter()
    for call in calls:
        number = earlier[call.session_id]
        earlier[call.session_id] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(call)
    return rounds


class _Conversation:
    """A drafter as one verifier uses it. A drafter that raises has no draft: that is no reason to end the stream."""

    def __init__(self, drafter: Drafter, calls: CallQueue, silence_s: float) -> None:
        self._drafter = drafter
        self._calls = calls
        self._sessions = OpenSessions(drafter, silence_s)
        self._answering: list[asyncio.Task[DraftingReply | None]] = []

    async def watch(self) -> None:
        """Close sessions of which nothing is said any more."""
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._sessions.close_silent()

    async def end(self) -> None:
        """Close all sessions; first nobody may be opening one any more."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        self._sessions.close_all()

    def ahead(self, session_id: str) -> list[Draft]:
        """Drafts for the step after next."""
        try:
            return list(self._drafter.ahead(session_id))
        except Exception:
            log.exception("drafting ahead failed for %s", session_id)
            return []

    def forget(self, call: ForgetTenant) -> bool:
        """Whether the drafter has forgotten."""
        try:
            self._drafter.forget(call)
        except Exception:
            log.exception("a tenant could not be forgotten")
            return False
        return True

    def answers(self, calls: Sequence[_OfSession]) -> Iterable[Awaitable[DraftingReply | None]]:
        """Together where they wait for look-ups; else one after the other, so that each reply leaves when it is there."""
        if self._drafter.looks_up:
            self._answering = [asyncio.create_task(self._answer(call)) for call in calls]
            return self._answering
        return (self._answer(call) for call in calls)

    async def _answer(self, call: _OfSession) -> DraftingReply | None:
        try:
            match call:
                case OpenSession():
                    self._sessions.opened(call.session_id)
                    return await self._drafter.open(call)
                case StepReport():
                    self._sessions.heard(call.session_id)
                    return await self._drafter.step(call)
                case FeatureChunk():
                    self._sessions.heard(call.session_id)
                    self._drafter.features(call)
                case CloseSession():
                    self._sessions.close(call.session_id)
        except Exception:
            log.exception("drafting failed for %s", call.session_id)
            if isinstance(call, OpenSession | StepReport):
                return _failure(call.session_id)
        return None
