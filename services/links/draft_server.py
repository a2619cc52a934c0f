"""What both draft links share: a drafter's side of the conversation."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence

from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingCall,
    DraftingReply,
    FeatureChunk,
    ForgetTenant,
    Forgotten,
    OpenSession,
    SessionCall,
)
from speculation.ports import Drafter

log = logging.getLogger(__name__)

# Ends a conversation.
END = None


async def converse(drafter: Drafter, calls: asyncio.Queue[DraftingCall | None]) -> AsyncIterator[DraftingReply]:
    """Answer calls in their order until ``END``; with nothing to answer, draft ahead for those who were answered last."""
    ahead: dict[str, None] = {}
    while True:
        if ahead and calls.empty():
            session_id = next(iter(ahead))
            del ahead[session_id]
            for draft in _ahead(drafter, session_id):
                yield draft
            # A call that came meanwhile goes first.
            await asyncio.sleep(0)
            continue
        waiting = [await calls.get()]
        # What was asked before a tenant is forgotten is answered before.
        while not calls.empty() and not isinstance(waiting[-1], ForgetTenant):
            waiting.append(calls.get_nowait())
        for call in waiting:
            if isinstance(call, FeatureChunk):
                _take_features(drafter, call)
        for together in _rounds([call for call in waiting if isinstance(call, SessionCall)]):
            for answering in _answers(drafter, together):
                reply = await answering
                if isinstance(reply, Draft):
                    ahead[reply.session_id] = None
                if reply is not None:
                    yield reply
        if isinstance(last := waiting[-1], ForgetTenant) and _forget(drafter, last):
            yield Forgotten(forget_id=last.forget_id)
        if END in waiting:
            return


def _forget(drafter: Drafter, call: ForgetTenant) -> bool:
    try:
        drafter.forget(call)
    except Exception:
        log.exception("a tenant could not be forgotten")
        return False
    return True


def _take_features(drafter: Drafter, call: FeatureChunk) -> None:
    try:
        drafter.features(call)
    except Exception:
        log.exception("hidden states of %s were lost", call.session_id)


def _rounds(calls: Iterable[SessionCall]) -> list[list[SessionCall]]:
    """Calls that are answered together, so that their look-ups share messages; those of one session one after the other."""
    rounds: list[list[SessionCall]] = []
    earlier: Counter[str] = Counter()
    for call in calls:
        number = earlier[call.session_id]
        earlier[call.session_id] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(call)
    return rounds


def _ahead(drafter: Drafter, session_id: str) -> list[Draft]:
    try:
        return list(drafter.ahead(session_id))
    except Exception:
        log.exception("drafting ahead failed for %s", session_id)
        return []


def _answers(drafter: Drafter, calls: Sequence[SessionCall]) -> Iterable[Awaitable[DraftingReply | None]]:
    """Together where they wait for look-ups; else one after the other, so that each reply leaves when it is there."""
    if drafter.looks_up:
        return [asyncio.create_task(_answer(drafter, call)) for call in calls]
    return (_answer(drafter, call) for call in calls)


async def _answer(drafter: Drafter, call: SessionCall) -> DraftingReply | None:
    """Hand ``call`` to ``drafter``. A drafter that raises has no draft: that is no reason to end the stream."""
    try:
        if isinstance(call, CloseSession):
            drafter.close(call)
            return None
        return await (drafter.open(call) if isinstance(call, OpenSession) else drafter.step(call))
    except Exception:
        log.exception("drafting failed for %s", call.session_id)
        return DraftFailure(session_id=call.session_id, reason="the drafter failed; its log says why")
