"""Calls to a drafter, and the bounded, ordered queue in which they wait."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from services.links.codec.features import features_of, with_features
from speculation.columns import ReportColumns, SentReports
from speculation.messages import CloseSession, DraftingCall, FeatureChunk, ForgetTenant, OpenSession, StepReport

log = logging.getLogger(__name__)

# Ends a conversation.
END = None

QueuedCall = DraftingCall | ReportColumns


class SentCalls:
    """The calls of a ``DraftLink``, all sent in one way."""

    def open(self, message: OpenSession) -> None:
        self._send(message)

    def step(self, message: StepReport) -> None:
        self._send(message)

    def steps(self, reports: SentReports) -> None:
        for report in reports.alone():
            self.step(report)

    def features(self, message: FeatureChunk) -> None:
        self._send(message)

    def close(self, message: CloseSession) -> None:
        self._send(message)

    def forget(self, message: ForgetTenant) -> None:
        self._send(message)

    def _send(self, call: DraftingCall) -> None:
        raise NotImplementedError


class CallQueue:
    """A queue between one sender and one reader in the same event loop.

    A verifier must not wait: it uses ``push``, which drops the oldest hidden states when too many are queued (sources can do
    without them). A drafter's server may wait: it uses ``put``, which slows the sender down.

    Attributes:
        most_calls, most_feature_bytes: default limits of queued calls and of their hidden states in bytes.
        feature_bytes: bytes of hidden states in the queue.
        dropped: how often hidden states were dropped.
    """

    most_calls = 4096
    most_feature_bytes = 128 << 20

    def __init__(self, most_calls: int | None = None, most_feature_bytes: int | None = None) -> None:
        self._most_calls = most_calls or self.most_calls
        self._most_feature_bytes = most_feature_bytes or self.most_feature_bytes
        self._calls: OrderedDict[int, QueuedCall] = OrderedDict()
        # How many calls these are: columns stand for several.
        self._waiting = 0
        # Bytes of hidden states, by the number of the call that carries them.
        self._carrying: OrderedDict[int, int] = OrderedDict()
        self._next = 0
        self._ended = False
        self._came = asyncio.Event()
        self._room = asyncio.Event()
        self.feature_bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, call: QueuedCall) -> bool:
        """Add ``call`` now; False, without adding it, if the queue is full."""
        if self._waiting >= self._most_calls:
            return False
        self._add(call)
        while self.feature_bytes > self._most_feature_bytes:
            self._drop_oldest_features()
        return True

    async def put(self, call: QueuedCall) -> None:
        """Add ``call`` as soon as there is room."""
        while self._waiting >= self._most_calls or self.feature_bytes >= self._most_feature_bytes:
            self._room.clear()
            await self._room.wait()
        self._add(call)

    def end(self) -> None:
        """End the queue: ``get`` returns ``END`` after the last call."""
        self._ended = True
        self._came.set()

    def abandon(self) -> None:
        """End the queue and drop the calls in it."""
        self._calls.clear()
        self._waiting = 0
        self._carrying.clear()
        self.feature_bytes = 0
        self.end()

    async def get(self) -> QueuedCall | None:
        """The next call; ``END`` after the last one."""
        while not self._calls and not self._ended:
            self._came.clear()
            await self._came.wait()
        return self.get_nowait()

    def get_nowait(self) -> QueuedCall | None:
        """The next call; ``END`` if there is none."""
        if not self._calls:
            return END
        number, call = self._calls.popitem(last=False)
        self._waiting -= _size(call)
        if self._carrying:
            self.feature_bytes -= self._carrying.pop(number, 0)
        if not self._room.is_set():
            self._room.set()
        return call

    def _add(self, call: QueuedCall) -> None:
        self._calls[self._next] = call
        self._waiting += _size(call)
        if (features := features_of(call)) is not None:
            self._carrying[self._next] = len(features.data)
            self.feature_bytes += len(features.data)
        self._next += 1
        self._came.set()

    def _drop_oldest_features(self) -> None:
        number, size = self._carrying.popitem(last=False)
        self.feature_bytes -= size
        if not self.dropped:
            log.warning("a drafter does not keep up: hidden states for it are dropped")
        self.dropped += 1
        call = self._calls[number]
        if isinstance(call, StepReport):
            self._calls[number] = with_features(call, None)
        else:
            del self._calls[number]
            self._waiting -= 1


def _size(call: QueuedCall) -> int:
    return max(1, len(call)) if isinstance(call, ReportColumns) else 1
