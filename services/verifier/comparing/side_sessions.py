"""Sessions at a drafter beside those of the decoding loop, on the same link."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from speculation.columns import DraftColumns, SentReports
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingReply,
    FeatureChunk,
    ForgetTenant,
    Forgotten,
    OpenSession,
    StepReport,
)
from speculation.ports import DraftLink, DraftReceiver

Replies = asyncio.Queue[Draft | DraftFailure]


class SideSessions:
    """Implements ``speculation.ports.DraftLink`` by another one. The loop that starts it hears nothing of side sessions."""

    def __init__(self, link: DraftLink) -> None:
        self._link = link
        self._replies: dict[str, Replies] = {}

    @property
    def connected(self) -> bool:
        return self._link.connected

    async def start(self, receiver: DraftReceiver) -> None:
        await self._link.start(_Sorting(receiver, self._replies))

    def open(self, message: OpenSession) -> None:
        self._link.open(message)

    def step(self, message: StepReport) -> None:
        self._link.step(message)

    def steps(self, reports: SentReports) -> None:
        self._link.steps(reports)

    def features(self, message: FeatureChunk) -> None:
        self._link.features(message)

    def close(self, message: CloseSession) -> None:
        self._link.close(message)

    def forget(self, message: ForgetTenant) -> None:
        self._link.forget(message)

    async def stop(self) -> None:
        await self._link.stop()

    @contextmanager
    def session(self, name: str) -> Iterator[Replies]:
        """The replies to a side session during a block, which opens it; afterwards it is closed."""
        replies = self._replies[name] = Replies()
        try:
            yield replies
        finally:
            del self._replies[name]
            self._link.close(CloseSession(session_id=name))


class _Sorting:
    """Implements ``DraftReceiver``: hands replies to side sessions to those, and all else to the loop."""

    def __init__(self, receiver: DraftReceiver, replies: dict[str, Replies]) -> None:
        self._receiver = receiver
        self._replies = replies

    def on_reply(self, reply: DraftingReply) -> None:
        replies = None if not self._replies or isinstance(reply, Forgotten) else self._replies.get(reply.session_id)
        if replies is None or isinstance(reply, Forgotten):
            self._receiver.on_reply(reply)
        else:
            replies.put_nowait(reply)

    def on_drafts(self, drafts: DraftColumns) -> None:
        if not self._replies:
            self._receiver.on_drafts(drafts)
            return
        for draft in drafts.alone():
            self.on_reply(draft)

    def on_connected(self) -> None:
        for name, replies in self._replies.items():
            replies.put_nowait(DraftFailure(session_id=name, reason="the drafter has changed"))
        self._receiver.on_connected()
