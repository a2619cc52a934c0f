"""Who waits, who is being decoded, and who has to step back when memory runs out."""

from __future__ import annotations

import logging
import time
from collections import deque

from services.verifier.engine.config import LoopConfig
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import LoopStats
from services.verifier.target_port import Prefix, Sampling, Target
from speculation.errors import Internal, InvalidArgument, OutriderError, ResourceExhausted
from speculation.messages import GenerationRequest

log = logging.getLogger(__name__)

# Rows that every request which is being decoded may need soon: new ones are admitted beside that much room, so that they do
# not push out those that are there.
_HEADROOM = 64


class Admission:
    """Requests of one loop, first come, first served.

    Memory is given out as answers grow. When there is none left, the request that was admitted last steps back: it waits in
    front of all others, and what it has committed is computed anew when there is room. Nothing of its answer is lost, and
    the one that was admitted first always gets on.

    Attributes:
        waiting: not admitted yet, or not any more.
        live: by id, in the order of admission.
    """

    def __init__(self, target: Target, config: LoopConfig, stats: LoopStats) -> None:
        self.waiting: deque[LiveRequest] = deque()
        self.live: dict[str, LiveRequest] = {}
        self._ended: list[LiveRequest] = []
        self._target = target
        self._config = config
        self._stats = stats

    def check(self, request: GenerationRequest) -> None:
        """Whether it may wait.

        Raises:
            InvalidArgument: its id is in use.
            ResourceExhausted: too many wait already.
        """
        if request.request_id in self.live or any(session.id == request.request_id for session in self.waiting):
            raise InvalidArgument("request_id", request.request_id, "unused")
        most = self._config.max_waiting
        if len(self.waiting) >= most + max(0, self._config.max_num_seqs - len(self.live)):
            raise ResourceExhausted(f"{most} requests are waiting already (max_waiting)")

    def admit(self) -> list[LiveRequest]:
        """Let in whom there is room for; gives those that drafters do not know yet."""
        new = []
        while self.waiting and len(self.live) < self._config.max_num_seqs:
            session = self.waiting[0]
            rows = len(session.tokens) + session.max_nodes
            prefix = Prefix(tokens=session.tokens, tenant=session.tenant)
            sampling = Sampling(params=session.request.sampling, prompt_length=len(session.request.prompt))
            try:
                opened = self._target.open(session.id, rows, prefix, sampling=sampling, spare=_HEADROOM * len(self.live))
            except Exception:
                log.exception("no room could be made for %s", session.id)
                self._end(session, Internal("the request could not be admitted; the server's log says why"))
                continue
            if not opened and self.live:
                break
            if not opened:
                # Not even alone: the pool is smaller than a request may be.
                most = "small enough for the key-value cache"
                self._end(session, InvalidArgument("max_tokens", session.request.sampling.max_tokens, most))
                continue
            self.waiting.popleft()
            session.computed = self._target.computed(session.id)
            self._stats.prompt_tokens += len(session.tokens)
            self._stats.prompt_tokens_cached += session.computed
            self.live[session.id] = session
            if not session.admitted:
                session.admitted = True
                session.queue_s = time.perf_counter() - session.submitted_at
                new.append(session)
        return new

    def make_room(self, sessions: list[LiveRequest], *, wait: bool) -> list[LiveRequest]:
        """Those of ``sessions`` that have the memory for their next pass.

        Args:
            wait: passes are under way, whose end may free memory.
        """
        for session in sessions:
            while session.id in self.live and not self._grow(session):
                last = next(other for other in reversed(self.live.values()) if not other.in_pass)
                if last is session and len(self.live) == 1:
                    self._end(session, ResourceExhausted("the key-value cache is too small for the request"))
                elif last is session and wait:
                    break
                else:
                    self._preempt(last)
        fitting = [session for session in sessions if session.id in self.live and self._grow(session)]
        return [session for session in fitting if session.id in self.live]

    def _grow(self, session: LiveRequest) -> bool:
        """Make room for all that is committed, and the largest tree behind it; False if there is none. Where that fails the
        request ends, and needs none."""
        try:
            return self._target.grow(session.id, len(session.tokens) + session.max_nodes)
        except Exception:
            log.exception("no room could be made for %s", session.id)
            self._end(session, Internal("the request could not go on; the server's log says why"))
            return True

    def left(self) -> list[LiveRequest]:
        """Those that have been ended, or whose consumers have gone, and that no pass holds."""
        ended, self._ended = self._ended, []
        for session in [session for session in self.waiting if session.closed and not session.admitted]:
            self.waiting.remove(session)
        closed = [session for session in (*self.live.values(), *self.waiting) if session.closed and not session.in_pass]
        return ended + closed

    def admitted(self) -> list[LiveRequest]:
        """Those that drafters know: being decoded, or stepped back."""
        return [*self.live.values(), *(session for session in self.waiting if session.admitted)]

    def find(self, session_id: str) -> LiveRequest | None:
        """One of them."""
        found = self.live.get(session_id)
        return found or next((session for session in self.admitted() if session.id == session_id), None)

    def forget(self, session: LiveRequest) -> None:
        """It has ended."""
        self.live.pop(session.id, None)
        if session in self.waiting:
            self.waiting.remove(session)

    def _end(self, session: LiveRequest, error: OutriderError) -> None:
        """Fail it; whatever it holds is freed with those that have left."""
        self.forget(session)
        session.fail(error)
        self._ended.append(session)

    def _preempt(self, session: LiveRequest) -> None:
        log.info("%s steps back after %d tokens: the cache is full", session.id, len(session.tokens))
        self._stats.preemptions += 1
        self._target.close(session.id)
        session.computed = 0
        del self.live[session.id]
        self.waiting.appendleft(session)
