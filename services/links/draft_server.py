"""What both draft links share: a drafter's side of the conversation."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

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
    StepReport,
)
from speculation.ports import Drafter

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# What concerns one session, in the order in which it was said.
_OfSession = SessionCall | FeatureChunk

# Ends a conversation.
END = None
# Replies that wait to be sent; where there are more, drafting waits for whoever reads them.
_REPLIES = 4096


async def converse(drafter: Drafter, calls: asyncio.Queue[DraftingCall | None]) -> AsyncIterator[DraftingReply]:
    """Answer calls in their order until ``END``; what takes longer comes when it is ready."""
    conversation = _Conversation(drafter)
    talking = asyncio.create_task(conversation.talk(calls), name="drafting")
    try:
        while (reply := await conversation.replies.get()) is not END:
            yield reply
        await talking
    finally:
        await conversation.end(talking)


class _Conversation:
    """A drafter's side of it. What fails concerns one call: a drafter that raises has no draft, no more.

    Attributes:
        replies: what there is to be sent.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.replies: asyncio.Queue[DraftingReply | None] = asyncio.Queue(_REPLIES)
        self._drafter = drafter
        # Answers and drafts that are waited for.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def talk(self, calls: asyncio.Queue[DraftingCall | None]) -> None:
        """Answer all calls."""
        try:
            while await self._answer_waiting(calls):
                pass
        finally:
            await self.replies.put(END)

    async def end(self, talking: asyncio.Task[None]) -> None:
        """Wait for nothing any more."""
        tasks = [talking, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_waiting(self, calls: asyncio.Queue[DraftingCall | None]) -> bool:
        """Answer what has come; whether the conversation goes on."""
        waiting = [await calls.get()]
        # What was asked before a tenant is forgotten is answered before.
        while not calls.empty() and not isinstance(waiting[-1], ForgetTenant):
            waiting.append(calls.get_nowait())
        for together in _rounds([call for call in waiting if isinstance(call, _OfSession)]):
            # One alone needs no task: that would be two more turns of the event loop for every draft.
            alone = len(together) == 1
            for answering in [self._answer(call) if alone else self._start(self._answer(call)) for call in together]:
                if (reply := await answering) is not None:
                    await self.replies.put(reply)
        if isinstance(last := waiting[-1], ForgetTenant):
            self._start(self._forget(last))
        return END not in waiting

    async def _answer(self, call: _OfSession) -> Draft | DraftFailure | None:
        try:
            match call:
                case OpenSession():
                    return self._with_further(call.session_id, await self._drafter.open(call))
                case StepReport():
                    return self._with_further(call.session_id, await self._drafter.step(call))
                case FeatureChunk():
                    self._drafter.features(call)
                case CloseSession():
                    self._drafter.close(call)
        except Exception:
            log.exception("drafting failed for %s", call.session_id)
            if isinstance(call, OpenSession | StepReport):
                return DraftFailure(session_id=call.session_id, reason="the drafter failed; its log says why")
        return None

    def _with_further(self, session_id: str, reply: Draft | DraftFailure | None) -> Draft | DraftFailure | None:
        if not isinstance(reply, DraftFailure) and (further := self._drafter.further(session_id)) is not None:
            self._start(self._send(session_id, further))
        return reply

    async def _send(self, session_id: str, drafts: AsyncIterator[Draft]) -> None:
        try:
            async for draft in drafts:
                await self.replies.put(draft)
        except Exception:
            log.exception("there are no further drafts for %s", session_id)

    async def _forget(self, call: ForgetTenant) -> None:
        try:
            await self._drafter.forget(call)
        except Exception:
            log.exception("a tenant could not be forgotten")
        else:
            await self.replies.put(Forgotten(forget_id=call.forget_id))

    def _start(self, doing: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


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
