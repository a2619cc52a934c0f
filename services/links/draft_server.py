"""The drafter's side of a draft link, shared by the in-process link and the gRPC link."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

from outrider.internal.v1 import drafting_pb2
from services.links.call_queue import END, CallQueue
from services.links.codec.columns import MOST_NUMBERS, numbers_of_nodes
from services.links.codec.drafting import each_alone, encode_drafting_replies, encode_drafting_reply
from services.links.codec.features import features_of, with_features
from services.links.open_sessions import OpenSessions
from speculation.columns import DraftColumns, ReportColumns
from speculation.messages import (
    CloseSession,
    DraftFailure,
    DraftingReply,
    FeatureChunk,
    ForgetTenant,
    Forgotten,
    OpenSession,
    SessionCall,
    StepReport,
)
from speculation.ports import Drafter, DraftsAtOnce, DraftsTogether

log = logging.getLogger(__name__)

_T = TypeVar("_T")
Reply = DraftingReply | DraftColumns

# Most calls answered at once, and most unread replies. Beyond these the sender has to wait. Most replies put together.
_MOST, _TOGETHER = 4096, 64
# Most bytes of hidden states that wait for their session to be opened anew, behind a slow answer. Beyond it the oldest go.
_MOST_HELD = 64 << 20


async def converse(drafter: Drafter, calls: CallQueue, silence_s: float) -> AsyncGenerator[list[Reply], None]:
    """Answer calls until ``END``: those of one session in order, those of different sessions concurrently.

    Yields all replies that are there, so that they can be sent together.

    All sessions that it opened are closed when it ends. A caller that leaves it early must close it (``aclosing``).

    Args:
        silence_s: seconds without a call after which a session is closed.
    """
    conversation = _Conversation(drafter, silence_s)
    listening = asyncio.create_task(conversation.listen(calls), name="drafting-calls")
    watching = asyncio.create_task(conversation.watch(), name="silent-sessions")
    try:
        replies, ended = conversation.replies, False
        while not ended:
            found = [await replies.get()]
            while not replies.empty():
                found.append(replies.get_nowait())
            ended = found[-1] is END
            if ready := [reply for each in found if each is not END for reply in each]:
                yield ready
    finally:
        for task in (listening, watching):
            task.cancel()
        await asyncio.gather(listening, watching, return_exceptions=True)
        await conversation.end()


def encode_replies(replies: Sequence[Reply], *, columns: bool = True) -> list[drafting_pb2.DraftResponse]:
    """The messages for ``replies``. A draft that cannot be encoded becomes a failure of its session only.

    Args:
        columns: as of ``encode_drafting_replies``.
    """
    try:
        return list(encode_drafting_replies(replies, columns=columns))
    except (ValueError, TypeError):
        return [_encode_reply(reply) for reply in each_alone(replies)]


def _encode_reply(reply: DraftingReply) -> drafting_pb2.DraftResponse:
    """The message for ``reply``. A draft that cannot be encoded becomes a failure of its session only."""
    try:
        return encode_drafting_reply(reply)
    except (ValueError, TypeError):
        if isinstance(reply, Forgotten):
            raise
        log.exception("a draft for session %s cannot be sent", reply.session_id)
        return encode_drafting_reply(_failure(reply.session_id))


def _failure(session_id: str) -> DraftFailure:
    return DraftFailure(session_id=session_id, reason="the drafter failed; its log says why")


class _Opening:
    """A call that opens a session, and the hidden states that came before it was answered."""

    def __init__(self, call: OpenSession) -> None:
        self.call = call
        self.features: deque[FeatureChunk] = deque()
        self._bytes = 0

    def hold(self, chunk: FeatureChunk) -> None:
        self.features.append(chunk)
        self._bytes += len(chunk.features.data)
        while self._bytes > _MOST_HELD:
            self._bytes -= len(self.features.popleft().features.data)


class _Conversation:
    """One verifier's conversation with a drafter. An exception of the drafter fails one session, not the conversation.

    Attributes:
        replies: replies to send, several at once, then ``END``.
    """

    def __init__(self, drafter: Drafter, silence_s: float) -> None:
        self._drafter = drafter
        self._at_once = drafter if isinstance(drafter, DraftsAtOnce) else None
        self._drafts_together = drafter if isinstance(drafter, DraftsTogether) else None
        self._sessions = OpenSessions(drafter, silence_s, asyncio.get_running_loop().time)
        self._room = asyncio.Semaphore(_MOST)
        self._tasks: set[asyncio.Task[Any]] = set()
        # By session: the task that answers its last call, and the task that makes further drafts after that.
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._further: dict[str, asyncio.Task[None]] = {}
        # By session: the last call that opens it, until the drafter is told.
        self._opening: dict[str, _Opening] = {}
        self.replies: asyncio.Queue[Sequence[Reply] | None] = asyncio.Queue(_MOST // _TOGETHER)

    async def listen(self, calls: CallQueue) -> None:
        """Answer calls until ``END``."""
        try:
            call = await calls.get()
            while call is not END:
                # A step's reports come together, and so do the drafts that are made at once.
                ready: list[DraftingReply] = []
                while len(ready) < _TOGETHER and isinstance(call, StepReport) and (reply := self._now(call)) is not None:
                    ready.append(reply)
                    call = calls.get_nowait()
                if ready:
                    await self.replies.put(ready)
                    call = await calls.get() if call is END else call
                    continue
                if isinstance(call, ReportColumns):
                    await self._take_columns(call)
                elif isinstance(call, ForgetTenant):
                    await self._forget(call)
                elif call is not END:
                    await self._take(call)
                call = await calls.get()
            await self._all_answered()
        except Exception:
            log.exception("a conversation with a verifier failed")
        await self.replies.put(END)

    async def watch(self) -> None:
        """Close silent sessions, for ever."""
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._sessions.close_silent()

    async def end(self) -> None:
        """Cancel all tasks, which could open further sessions, and close all sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sessions.close_all()

    async def _take_columns(self, reports: ReportColumns) -> None:
        """Answer reports that came together: together as far as the drafter can, and the others one by one."""
        try:
            drafts = self._together(reports)
        except Exception:
            log.exception("drafting failed for %d sessions together", len(reports))
            await self.replies.put([_failure(name) for name in reports.session_ids])
            return
        if drafts is not None and len(drafts):
            await self.replies.put([drafts])
        if drafts is not None and not drafts.left:
            return
        ready: list[DraftingReply] = []
        alone = reports.alone()
        for report in alone if drafts is None else [alone[at] for at in drafts.left]:
            reply = self._now(report)
            if ready and (reply is None or len(ready) == _TOGETHER):
                await self.replies.put(ready)
                ready = []
            if reply is None:
                await self._take(report)
            else:
                ready.append(reply)
        if ready:
            await self.replies.put(ready)

    def _together(self, reports: ReportColumns) -> DraftColumns | None:
        """The drafts of those sessions that the drafter can draft for together; None: nothing was done for any.

        Raises:
            Exception: drafting failed.
        """
        if self._drafts_together is None or not self._answering.keys().isdisjoint(reports.session_ids):
            return None
        # All drafts share a message.
        if sum(map(numbers_of_nodes, reports.max_nodes)) > MOST_NUMBERS:
            return None
        drafts = self._drafts_together.together(reports)
        if drafts is not None:
            self._heard(drafts.session_ids)
        return drafts

    def _heard(self, names: Sequence[str]) -> None:
        """Note that steps of sessions have been answered: further drafts still being made are for an earlier prefix."""
        self._sessions.heard(*names)
        for name in names if self._further else ():
            if (further := self._further.pop(name, None)) is not None:
                further.cancel()

    async def _take(self, call: SessionCall | FeatureChunk) -> None:
        name = call.session_id
        if isinstance(call, FeatureChunk):
            self._keep(call)
            return
        if isinstance(call, StepReport) and name in self._answering and (features := features_of(call)) is not None:
            # The drafter bounds the hidden states that it keeps. Queued here, they would pile up behind a slow answer.
            self._keep(FeatureChunk(session_id=name, features=features))
            call = with_features(call, None)
        await self._room.acquire()
        if isinstance(call, OpenSession):
            self._opening[name] = _Opening(call)
        # Further drafts still being made are for an earlier prefix.
        if (further := self._further.pop(name, None)) is not None:
            further.cancel()
        task = self._answering[name] = self._begin(self._answer(call, self._answering.get(name)))
        task.add_done_callback(lambda done: self._answered(name, done))

    def _now(self, call: StepReport) -> DraftingReply | None:
        """The answer to a step, where the drafter has it without a wait; None: it is to be asked in a task."""
        if self._at_once is None or call.session_id in self._answering:
            return None
        try:
            reply: DraftingReply | None = self._at_once.at_once(call)
        except Exception:
            log.exception("drafting failed for %s", call.session_id)
            reply = _failure(call.session_id)
        if reply is not None:
            self._heard([call.session_id])
        return reply

    def _begin(self, doing: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _answered(self, name: str, task: asyncio.Task[None]) -> None:
        self._room.release()
        if self._answering.get(name) is task:
            del self._answering[name]

    def _keep(self, call: FeatureChunk) -> None:
        if (opening := self._opening.get(call.session_id)) is not None:
            # Not for a session of the same name that lives until then.
            opening.hold(call)
            return
        self._sessions.heard(call.session_id)
        try:
            self._drafter.features(call)
        except Exception:
            log.exception("hidden states of session %s are lost", call.session_id)

    async def _answer(self, call: SessionCall, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            reply = await self._reply(call)
        except Exception:
            log.exception("drafting failed for session %s", call.session_id)
            reply = _failure(call.session_id) if isinstance(call, OpenSession | StepReport) else None
        if reply is not None:
            await self.replies.put([reply])
        wants = isinstance(call, OpenSession | StepReport) and not isinstance(reply, DraftFailure)
        if wants and self._answering.get(call.session_id) is asyncio.current_task():
            self._further[call.session_id] = self._begin(self._draft_further(call.session_id))

    async def _reply(self, call: SessionCall) -> DraftingReply | None:
        match call:
            case OpenSession():
                return await self._open(call)
            case StepReport():
                self._sessions.heard(call.session_id)
                return await self._drafter.step(call)
            case CloseSession():
                self._sessions.close(call.session_id)
        return None

    async def _open(self, call: OpenSession) -> DraftingReply | None:
        self._sessions.opened(call.session_id)
        reply = self._begin(self._drafter.open(call))
        # The drafter knows the session as soon as it has begun to open it.
        await asyncio.sleep(0)
        opening = self._opening.get(call.session_id)
        if opening is not None and opening.call is call:
            del self._opening[call.session_id]
            for chunk in opening.features:
                self._keep(chunk)
        return await reply

    async def _draft_further(self, session_id: str) -> None:
        try:
            async for draft in self._drafter.further(session_id):
                await self.replies.put([draft])
        except Exception:
            log.exception("further drafts failed for session %s", session_id)
        if self._further.get(session_id) is asyncio.current_task():
            del self._further[session_id]

    async def _all_answered(self) -> None:
        while self._answering:
            await asyncio.wait(list(self._answering.values()))

    async def _forget(self, call: ForgetTenant) -> None:
        # Calls that came before this one are answered first.
        await self._all_answered()
        try:
            await self._drafter.forget(call)
        except TimeoutError:
            log.error("a tenant was not forgotten in time: a source hangs, or the machine is overloaded")
            return
        except Exception:
            log.exception("a tenant could not be forgotten")
            return
        await self.replies.put([Forgotten(forget_id=call.forget_id)])
